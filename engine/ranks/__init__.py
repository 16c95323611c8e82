"""Several ranks under one engine: a process for each, the plans they are sent, and what becomes of one that is lost.

adapters: adapters on several ranks
agreement: numbers that every rank must know of every other, told through their group
channel: a rank's end of the socket to its engine
cluster_messages: what node 0 and the process that stands for another node (node.py) say to each other once that was
    let in
effort: what a rank does by itself, in seconds so far
executor: runs plans on several ranks
handshake: how a node is let in
hang: when a step that does not end is one that never will, and whose fault that is
messages: what the engine's process (rank 0) and those of its other ranks say to each other
network: addresses and interfaces of this host, as ranks on several hosts need them
node: a node without an API
nodes: the other nodes of an engine, as the first one sees them
peers: the other ranks of an engine, as rank 0 sees them
place: where ranks run
placing: puts the ranks of an engine where the options want them
ray_cluster: ranks on a Ray cluster
"""
