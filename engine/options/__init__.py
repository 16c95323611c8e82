"""What an engine can be told: options, how one is declared, and what is wrong with values.

cgroup: limits of memory and cores that the control groups of this process set
config: every option of the engine, declared, defaulted and validated in one place
config_checks: options of the engine that contradict each other, said before anything is read or started
kv_events_settings: what --kv-events-config asks for
model_path: where a model is, said without torch
option: how an option is declared
option_values: what is wrong with the value of an option, in words, where its bounds and choices do not say it
purpose: what a model is served for
speculation: what `--speculative-config` asks for
"""
