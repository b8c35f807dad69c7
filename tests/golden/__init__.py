"""Golden answers: what the library says of many small models, kept in a file, and compared.

`python -m golden compare` from `tests/` exits with 1 and a list if an answer has changed;
`python -m golden write` keeps the answers of today. See :mod:`golden.answers` for the fields.
"""
