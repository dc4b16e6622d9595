"""Load generator and sweep for any OpenAI-compatible server: `python -m dspark_jax.serving.bench`.

Flags and result keys are those of `vllm bench serve`, so results can be compared and scripts
reused. `python -m dspark_jax.serving.bench sweep` starts the server itself for every arm.
"""
