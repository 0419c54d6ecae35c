"""Records of what earlier versions did: later ones must do the same."""
