"""Runs of other layouts as runs of one rank: parts added up, stages in line, samples matched."""
