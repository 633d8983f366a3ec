"""The file between training and comparison: writer and reader; never loads torch.

Nothing is imported here: `trace.batch` is wanted without Arrow.
"""
