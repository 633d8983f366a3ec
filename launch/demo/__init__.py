"""`upguard demo`: two short, real Megatron trainings; a fault planted in one is found."""
