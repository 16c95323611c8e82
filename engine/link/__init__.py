"""What goes between the processes of a server: messages, plans, sockets, the log.

clients: several API processes that one engine works for
connection: messages over a Unix socket, and the folders that these sockets are in
logs: log lines of every process, and what a process does first that another one has started
media: pictures as they stand in a prompt
messages: what the API process and the engine process say to each other
plan: one step as the scheduler hands it to the runner, and what comes back
sampling_params: what a request asks for
turns: how long a thread keeps the interpreter's lock
"""
