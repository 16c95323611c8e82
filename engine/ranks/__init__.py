"""Several ranks under one engine: a process for each, the plans they are sent, and what becomes of one that is lost.

adapters: adapters on several ranks
agreement: how ranks find each other, and what they must have in common before they step
executor: runs plans on several ranks
handshake: how a node is let in, and the addresses and interfaces by which hosts reach each other
hang: what a rank does by itself, and when a step that does not end is one that never will
messages: what rank 0, the other ranks and the processes that stand for other nodes say to each other, and a rank's end
node: a node without an API
nodes: the other nodes of an engine, as the first one sees them
peers: the other ranks of an engine, as rank 0 sees them
place: where ranks run
placing: puts the ranks of an engine where the options want them
ray_cluster: ranks on a Ray cluster
"""
