"""One file per operator family: check, configuration, kernel, launch."""
