"""From a verdict to text and JSON."""
