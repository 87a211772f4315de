"""What is wrong with a job's memory, found in a recording of it, and what all the advice would save."""

import memfit

# A recording of a job that keeps a tensor of every step. Yours is a file: memfit.diagnose("run.pickle").
builder = memfit.TraceBuilder()
ends = []
for _ in range(12):
    builder.alloc(64 << 20, category="activation", phase="forward", where="train.py:31 step")
    builder.free(builder.alloc(256 << 20, phase="backward", where="train.py:32 step"))
    ends.append(len(builder))
builder.meta["step_ends"] = ends
builder.build().save("leaking.memfit-trace")

diagnosis = memfit.diagnose("leaking.memfit-trace")
for finding in diagnosis.at_least("warning"):
    print(finding.rule, "at", finding.where)
    print(finding.summary)
    print("to type:", finding.advice[0].typed)
print("all the advice saves", memfit.format_bytes(diagnosis.total_saving_bytes))
