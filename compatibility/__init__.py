"""Tests this project with many versions of Python, torch, diffusers and transformers.

python -m compatibility             test every environment, write the versions in docs/index.md
python -m compatibility.wheel FILE  test a wheel in a clean environment
python -m compatibility.hub         build attention_kernels for the Hugging Face Hub
"""
