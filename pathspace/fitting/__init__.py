"""The best gauge for a purpose: quantisation, half precision, smoothing, folding."""
