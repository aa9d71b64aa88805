"""Steps of TensorFlow Recommenders Addons for bench/experiments/peers.py, in an environment that has TensorFlow.

``python bench/peers_tfra.py DATA.npz OPTIMIZER RATE THREADS`` answers each line: a number makes the step on that batch, a path
writes the rows of all tables there.
"""

import os
import sys
from pathlib import Path

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", TF_USE_LEGACY_KERAS="1")
# What libraries print must not come among the answers.
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from tensorflow_recommenders_addons import dynamic_embedding as de  # noqa: E402


def main(path: str, name: str, rate: float, threads: int) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    data = np.load(path)
    batches = [[tf.constant(part) for part in batch] for batch in data["ids"]]
    gradient = tf.constant(data["gradient"])
    keras = tf.keras.optimizers.legacy
    made = {
        "SGD": lambda: keras.SGD(rate),
        "Adagrad": lambda: keras.Adagrad(rate, initial_accumulator_value=0.0, epsilon=1e-10),
        "AdamW": lambda: keras.Adam(rate),
    }[name]()
    optimizer = de.DynamicEmbeddingOptimizer(made)
    tables = [
        de.get_variable(
            f"t{number}",
            key_dtype=tf.int64,
            value_dtype=tf.float32,
            dim=gradient.shape[1],
            devices=["/CPU:0"],
            initializer=0.0,
        )
        for number in range(len(batches[0]))
    ]
    shadows = [
        de.shadow_ops.ShadowVariable(table, name=f"s{number}", max_norm=None, trainable=True)
        for number, table in enumerate(tables)
    ]

    @tf.function
    def step(batch: list) -> None:
        with tf.GradientTape() as tape:
            loss = 0.0
            for shadow, ids in zip(shadows, batch, strict=True):
                rows, place = tf.unique(ids)
                loss += tf.reduce_sum(tf.gather(de.shadow_ops.embedding_lookup(shadow, rows), place) * gradient)
        optimizer.apply_gradients(zip(tape.gradient(loss, shadows), shadows, strict=True))

    answers.write("ready\n")
    for line in sys.stdin:
        asked = line.strip()
        if asked.isdigit():
            step(batches[int(asked)])
        else:
            found = {}
            for number, table in enumerate(tables):
                ids = np.unique(data["ids"][:, number])
                found[f"ids{number}"], found[f"rows{number}"] = ids, table.lookup(tf.constant(ids)).numpy()
            with Path(asked).open("wb") as file:
                np.savez(file, **found)
        answers.write("done\n")


main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
