"""Estimators: fake runs in a process of their own, for whoever must not wait for them or be disturbed by them.

A fake run replaces functions of torch for the whole process while it lasts, and takes seconds: nothing for the kernel of a notebook, where
cells run beside it. `client.Estimator` starts a worker (`python -m workbench.estimators`), asks it `wire.Question`s, and gets
`wire.Answer`s: the logs of fake runs, which numpy alone can read. `curves.Curves` keeps them, and makes everything between of them.
"""
