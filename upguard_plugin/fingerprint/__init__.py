"""The fingerprint of a tensor: definition, kernels, sketch. Loads nothing until a name is used."""
