"""What goes between the processes of a server: messages, plans, sockets, the log.

child: what a process does first that another one has started, or that may have to show its stacks
clients: several API processes that one engine works for
connection: messages over a Unix socket
logs: log lines of every process
messages: what the API process and the engine process say to each other
plan: one step as the scheduler hands it to the runner, and what comes back
private_folder: folders that processes of a server meet in
sampling_params: what a request asks for
turns: how long a thread keeps the interpreter's lock
"""
