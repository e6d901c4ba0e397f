/* What all scans share: where a row's states lie, when they are kept, and how the work is cut into tasks. */
#include "scans.h"

enum { SLOT_STATE = SLOT_ATTENTION }; /* of a state that is written nowhere; no attention runs at the same time */
#define LEAST_TASK 32768              /* numbers of states times tokens: some microseconds */

typedef struct {
    Advance advance;
    const void *about;
    const StateRows *rows;
    const Tiles *tiles;
    const long *starts; /* [rows]: first tokens */
    long units, unit_floats, task_units, row_tasks;
} Run;

static void run_unit(const Run *a, long row, long unit)
{
    const StateRows *r = a->rows;
    long bytes = a->unit_floats * 4, done = 0;
    const float *from = state_at(r, a->tiles, r->read + row * r->pages, unit, a->unit_floats);
    float *state = state_at(r, a->tiles, r->written + row * r->pages, unit, a->unit_floats);
    if (!state)
        state = pagewire_scratch(SLOT_STATE, bytes);
    if (!from)
        memset(state, 0, bytes);
    else if (from != state)
        memcpy(state, from, bytes);
    for (long i = 0; i < r->keeps; i++) {
        if (r->keep_rows[i] != row)
            continue;
        a->advance(a->about, state, a->starts[row] + done, r->keep_counts[i] - done, unit);
        done = r->keep_counts[i];
        float *kept = state_at(r, a->tiles, r->keep_pages + i * r->pages, unit, a->unit_floats);
        if (kept)
            memcpy(kept, state, bytes);
    }
    a->advance(a->about, state, a->starts[row] + done, r->counts[row] - done, unit);
}

static void run_units(const void *about, long i)
{
    const Run *a = about;
    long row = i / a->row_tasks, unit = i % a->row_tasks * a->task_units, end = unit + a->task_units;
    for (end = end < a->units ? end : a->units; unit < end; unit++)
        run_unit(a, row, unit);
}

void pagewire_run_units(Advance advance, const void *about, const StateRows *rows, const Tiles *tiles, long units,
                        long unit_floats)
{
    if (!rows->rows)
        return;
    long starts[rows->rows], tokens = 0, most = 1;
    for (long row = 0; row < rows->rows; row++) {
        starts[row] = tokens;
        tokens += rows->counts[row];
        most = rows->counts[row] > most ? rows->counts[row] : most;
    }
    Run a = {advance, about, rows, tiles, starts, units, unit_floats};
    double work = (double)tokens * units * unit_floats;
    a.task_units = work < 2.0 * LEAST_TASK ? units : 1 + LEAST_TASK / (unit_floats * most);
    a.task_units = a.task_units < units ? a.task_units : units;
    a.row_tasks = (units + a.task_units - 1) / a.task_units;
    if (work < 2.0 * LEAST_TASK)
        for (long i = 0; i < rows->rows; i++)
            run_units(&a, i);
    else
        pagewire_run(rows->rows * a.row_tasks, run_units, &a);
}
