"""Outputs that follow a grammar: matchers, reasoning before them, and the account of what they cost.

grammar: grammars that outputs must follow
grammar_libraries: xgrammar and llguidance, their vocabularies read by their C interfaces, which leave the
    interpreter's lock to others
guide: one output's way through its grammar: the reasoning before it, and the account of what masks cost
"""
