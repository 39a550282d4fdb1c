"""Hold a page on solving problems, for cartridges that stand for no document of their own."""

PRIMER = "primer"
PRIMER_TEXT = """\
How to solve problems. Read the whole problem before you begin, and say in your own words what is \
asked for and in which form the answer is wanted. List what is given. Look for a method that fits, \
and try it on a small case. Then work step by step, one small step at a time, and check each step \
before you go on: put numbers back in, count again, look at units and at the extreme cases. When a \
step fails, go back to the last one that holds. Do not guess while you can compute.
How to review attempts at a problem. An attempt may be right, wrong or unfinished, and one that \
sounds sure may be wrong. Do not count votes alone: many attempts can share one mistake. Check \
where they differ first, for there at least one of them is wrong, and settle each difference by \
working that step out again yourself. Take over the steps that hold, from whichever attempt they \
come, and repair or drop the others. If every attempt fails, set all of them aside and solve the \
problem in another way. End with one answer, in the form that was asked for.
"""
