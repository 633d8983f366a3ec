"""Level `op`: every dispatched operator, with its module and its source line."""
