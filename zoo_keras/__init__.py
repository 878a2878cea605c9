"""The zoo: tasks with labelled data, and trained Keras models of many families for each.

::

    import zoo_keras

    task = zoo_keras.task("fashion-mnist")
    model = zoo_keras.load_model(task.name, "residual")
    samples = task.samples("validation")
    probabilities = model.predict(samples.inputs["image"])

Importing the package does not load TensorFlow; `load_model` and training do.
"""

from zoo_keras.info import ModelInfo
from zoo_keras.samples import Samples
from zoo_keras.tasks import Task, load_model, model_info, task, tasks

__all__ = ["ModelInfo", "Samples", "Task", "load_model", "model_info", "task", "tasks"]
