"""What must hold inside one run: replicas agree, collectives keep their data, recompute repeats."""
