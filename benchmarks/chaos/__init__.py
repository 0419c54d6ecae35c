"""The fault matrix: what a fault costs, counted and timed, over seeded runs of real processes.

Rows are numbered as in the reliability page of the design. Runs have 4 workers and 2 servers; their computing
is emulated, all else is real: processes, SIGKILL, SIGSTOP, sockets, disks. The seed chooses whom a fault hits
and when. `detected` is from the fault to the controller's note of it, `blackout` from the fault to the end of
the next step whose exchange began after it, as the script sees it; both are medians. `duplicated`, `lost`
(acknowledged updates) and `missing` (samples, of all epochs) are sums over all runs.

| row | fault | must be |
|---|---|---|
| 1 | a worker is killed in asp | detected within 1 s, nothing missing or lost |
| 2 | a worker is killed in bsp | on again within 2 s, nothing missing or lost |
| 3 | a worker is stopped for 1 s; for longer than the deadline | goes on; is fenced and can write no more |
| 4 | a server is killed that has a replica | on again within 1 s, nothing lost |
| 5 | a server is killed that has none | on again within 10 s, at most a checkpoint's interval lost |
| 6 | the controller is killed | training does not stall; status within 5 s |
| 8 | a tenth of all frames is dropped, doubled, swapped, or late | bitwise the result without |
| 9 | replies are lost | bitwise the result without |
| 10 | a frame is damaged or cut | refused; nothing missing |
| 11 | a worker pushes NaN; gradients 10⁴ times too large | refused and replaced; the model is sound |
| 12 | a kill, a full disk or a flipped bit in a checkpoint | the one before it loads, at ≥ 200 points |
| 15 | one of 4 workers is 5 times slower | backup ≥ 95 % steps/s, asp and ssp ≥ 75 % samples/s |
| 16 | 4 → 2 → 4 workers | the others stay, and wait for one step at most |
| 17 | somebody is killed every 15 s | goodput ≥ 90 %, loss within 1 % |
| 18 | an owner of shared memory is killed | nothing left after 5 s |
| 20 | everything is killed | resumed; at most a checkpoint's interval lost |
| 21 | the wall clock jumps by an hour | nothing happens |
| peers | the same kills under torchrun and Ray | how long they take, and what they lose |

    outcome    what a run came to, what a row promises, and the table
    running    runs under our own controller, and as `paceline run`
    roles      rows 1-5 and 8-11
    commands   rows 6, 18, 20 and 21: whole commands
    storage    row 12
    paces      rows 15 and 16
    goodput    row 17
    rivals     the peers
"""
