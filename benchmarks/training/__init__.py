"""Train the built-in weights: one script per model, and the code they share.

    python -m benchmarks.training.llama        a language model of the standard library's own text
    python -m benchmarks.training.flux         pictures of captioned shapes
    python -m benchmarks.training.cogvideo     videos of a moving captioned shape

Each script generates its data, trains, saves, reloads the saved model as a user would, evaluates
the model, and writes the model card next to the weights. Nothing is downloaded. The scripts are not
part of the installed package.
"""
