"""Models as a script builds them: its own layer spec is kept, and what it built is recorded afterwards.

`tensors` says what each tensor is, by module class and parameter name, `tensors_file` reads a user's own entries,
`build` makes the table of a whole model from three unsharded builds, `attach` puts records and multipliers on the model
that is trained, `given` says whether a config could say the same layers. The shims (layers/), from which a config's
model is built, record the same; both ways give one table on every model that both can build
(tests/model/as_built/test_same_table.py).
"""
