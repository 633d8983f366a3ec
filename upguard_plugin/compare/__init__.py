"""From events to a verdict; never loads torch."""
