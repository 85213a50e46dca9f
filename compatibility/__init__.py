"""Which versions of Python, torch, diffusers and transformers this project works with, by trying.

python -m compatibility             try the environments, write docs/compatibility.md
python -m compatibility.index       ask the index what the versions we name require
python -m compatibility.wheel FILE  try a wheel in a clean environment
"""
