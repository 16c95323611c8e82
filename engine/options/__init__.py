"""What an engine can be told: options, how one is declared, and what is wrong with values.

cgroup: limits of memory and cores that the control groups of this process set
config: every option of the engine, declared, defaulted and validated in one place
config_checks: what is wrong with the values of options, by themselves or together
extras: how to install a package that only some options need
kv_events_settings: what --kv-events-config asks for
model_names: names of models as people have them: copied addresses, names without an owner, Ollama's
model_path: where a model is, said without torch
option: how an option is declared
scheduler_config: what the scheduler and the cache go by, every option resolved
shelves: models that lie on this machine: the hub's cache, Ollama's and LM Studio's folders
speculation: what `--speculative-config` asks for
"""
