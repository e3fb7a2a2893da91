"""Training of the embedded demonstration model: scenes, tasks, model, loop, evaluation. Not shipped in the wheel."""
