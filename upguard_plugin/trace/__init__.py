"""The file between training and comparison: writer and reader; never loads torch."""
