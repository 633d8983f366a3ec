"""`upguard demo`: two short, real Megatron trainings, one with a planted fault, and its name found."""
