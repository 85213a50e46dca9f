"""How the built-in weights were made: one script per model, and what the three share.

    python -m training.llama        a language model of the standard library's own text
    python -m training.flux         pictures of captioned shapes
    python -m training.cogvideo     videos of a captioned shape that moves

Each makes its data, trains, saves, loads what it saved as anybody would, checks it, and writes the
model card beside the weights. Nothing is downloaded. Not part of the installed package.
"""
