"""Norms: RMSNorm and LayerNorm."""
