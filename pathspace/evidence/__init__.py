"""What is proven of a reduction graph: theorems, bounds, certificates, proofs, explanations."""
