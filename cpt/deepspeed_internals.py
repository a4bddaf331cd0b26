"""Every private name of DeepSpeed that cpt uses, each with its reason; `USED` is the contract that a test checks.

Read in DeepSpeed 0.19.
"""

# dotted name -> its parameters ("" for what is not called), why, what ends it
USED: dict[str, tuple[str, str, str]] = {}
