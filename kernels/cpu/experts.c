/* The feed-forward part of a mixture of experts. The products of all chosen experts are one list of tasks, and experts
 * that no token has chosen are not read.
 *
 * A token's bits depend on no other token: products are row by row, its experts are added best first, and which rank
 * computes an expert that several have follows from the token's position.
 *
 * Ranks with tokens of their own send each token once to each rank that computes some of its experts, and get the
 * result of each expert back. So a token's results are added where it came from, in the order in which one rank with all
 * experts adds them, and have the same bits.
 */
#include "experts.h"

#include "elements.h"
#include "rows.h"

static long greatest_of(const float *x, long n)
{
    long best = 0;
    for (long i = 1; i < n; i++)
        best = x[i] > x[best] ? i : best;
    return best;
}

static void score(const Router *a, const float *logits, float *scores)
{
    float most = logits[greatest_of(logits, a->num)], sum = 0;
    for (long i = 0; i < a->num; i++)
        sum += scores[i] = a->score == SCORE_SOFTMAX   ? expf(logits[i] - most)
                           : a->score == SCORE_SIGMOID ? 1 / (1 + expf(-logits[i]))
                                                       : logits[i];
    for (long i = 0; i < a->num && a->score == SCORE_SOFTMAX; i++)
        scores[i] /= sum;
}

/* Leaves the best groups. */
static void keep_groups(const Router *a, float *ranked)
{
    long size = a->num / a->groups;
    float best[a->groups];
    char is_kept[a->groups];
    memset(is_kept, 0, a->groups);
    for (long g = 0; g < a->groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (const float *x = ranked + g * size; x < ranked + (g + 1) * size; x++) {
            second = *x > first ? first : *x > second ? *x : second;
            first = *x > first ? *x : first;
        }
        best[g] = a->by_two ? first + second : first;
    }
    for (long i = 0; i < a->top_groups; i++) {
        long g = greatest_of(best, a->groups);
        is_kept[g] = 1;
        best[g] = -INFINITY;
    }
    for (long i = 0; i < a->num; i++)
        ranked[i] = is_kept[i / size] ? ranked[i] : -INFINITY;
}

/* The weight of the best of those that are `left`; distances are relative. */
static float weight_of_near(const Router *a, const float *logits, const float *left, long best)
{
    float sum = 0, most = left[best];
    for (long i = 0; i < a->num; i++) {
        float size = fabsf(logits[i]);
        if (!((most - logits[i]) / (size > most ? size : most) > 2 * a->jitter))
            sum += expf(left[i] - most);
    }
    return 1 / sum;
}

typedef struct {
    const Router *router;
    const float *logits;
    long stride;
    float *weights;
    int32_t *ids;
} Route;

static void route_rows(const void *about, long from, long to)
{
    const Route *r = about;
    const Router *a = r->router;
    float *scores = pagewire_scratch(SLOT_WEIGHTS, a->num * 8), *ranked = scores + a->num;
    for (long row = from; row < to; row++) {
        const float *logits = r->logits + row * r->stride;
        float *weights = r->weights + row * a->top_k, sum = 0;
        int32_t *ids = r->ids + row * a->top_k;
        score(a, logits, scores);
        /* Products have the order of their scores, and fewer equals. */
        for (long i = 0; i < a->num; i++)
            ranked[i] = a->correction ? scores[i] + a->correction[i] : a->groups > 1 ? scores[i] : logits[i];
        if (a->groups > 1)
            keep_groups(a, ranked);
        for (long i = 0; i < a->top_k; i++) {
            long best = greatest_of(ranked, a->num);
            float weight = scores[best];
            if (a->score == SCORE_NEAR)
                weight = weight_of_near(a, logits, ranked, best);
            else if (a->score == SCORE_CHOSEN)
                weight = expf(weight - scores[i ? ids[0] : best]);
            ids[i] = (int32_t)best;
            ranked[best] = -INFINITY;
            sum += weights[i] = weight;
        }
        sum = a->adds_floor ? sum + a->floor : sum > a->floor ? sum : a->floor;
        for (long i = 0; i < a->top_k; i++) {
            float weight = (a->renormalize ? weights[i] / sum : weights[i]) * a->scale;
            weights[i] = a->expert_scale ? weight * a->expert_scale[ids[i]] : weight;
        }
    }
}

void pagewire_route(const Router *a, const float *logits, long stride, float *weights, int32_t *ids, long m)
{
    run_rows(route_rows, &(Route){a, logits, stride, weights, ids}, m, a->num * (4 + a->top_k));
}

void pagewire_place(const Experts *e, int32_t *ids, const int64_t *positions, long m)
{
    long top_k = e->router.top_k;
    for (long i = 0; e->places && i < m * top_k; i++) {
        const int32_t *place = e->places + 3 * ids[i];
        ids[i] = positions[i / top_k] % place[2] == place[1] ? place[0] : -1;
    }
}

/* A token and one of its experts are an assignment; `places` are those of a token's choices in `parts`. */
typedef struct {
    const Experts *experts;
    const float *parts, *weights, *x;
    const int32_t *ids, *places;
    float *y;
    long x_stride, y_stride, hidden, adds;
} Combine;

static void combine_rows(const void *about, long from, long to)
{
    const Combine *a = about;
    const Experts *e = a->experts;
    long top_k = e->router.top_k;
    float *total = pagewire_scratch(SLOT_WEIGHTS, a->hidden * 4);
    for (long row = from; row < to; row++) {
        float *y = a->y + row * a->y_stride;
        long num = 0;
        for (long choice = 0; choice < top_k; choice++) {
            long i = row * top_k + choice, is_zero = a->ids[i] >= e->num_experts;
            if (a->ids[i] < 0)
                continue;
            const float *part = is_zero ? a->x + row * a->x_stride : a->parts + a->places[i] * a->hidden;
            float weight = is_zero ? a->weights[i] * e->zero_scale : e->scales_input ? 1 : a->weights[i];
            for (long j = 0; j < a->hidden; j++)
                total[j] = num ? total[j] + part[j] * weight : part[j] * weight;
            num++;
        }
        for (long j = 0; j < a->hidden; j++)
            y[j] = !num ? a->adds ? y[j] : 0 : a->adds ? y[j] + total[j] : total[j];
    }
}

typedef struct {
    const float *x, *weights;
    const int32_t *ids, *places;
    float *out;
    long x_stride, width, top_k;
} ScaleInputs;

/* out[place] = weight · x of each assignment. */
static void scale_inputs(const void *about, long from, long to)
{
    const ScaleInputs *a = about;
    for (long i = from; i < to; i++)
        for (long j = 0; j < a->width && a->ids[i] >= 0; j++)
            a->out[a->places[i] * a->width + j] = a->x[i / a->top_k * a->x_stride + j] * a->weights[i];
}

/* Of the assignments of some rows: `places` are those of each row's choices in `parts`. */
typedef struct {
    const float *parts;
    const int32_t *places;
} Results;

/* The results of the experts for each row's slots, until the next call. Those of slots without matrices are not set. */
static Results compute(const Experts *e, const float *weights, const int32_t *ids, const float *x, long x_stride, long m)
{
    long hidden = e->down[0].n, inner = e->down[0].k, width = e->gate_up[0].k, is_gated = e->gate_up[0].is_gated;
    long top_k = e->router.top_k, num = m * top_k, own = 0, count = 0, wide = is_gated ? 0 : e->gate_up[0].n;
    for (long i = 0; i < num; i++)
        own += ids[i] >= 0;
    long floats = own * (inner + hidden + wide + (e->scales_input ? width : 0)), ints = 2 * num + e->router.num + 1;
    float *gated = pagewire_scratch(SLOT_EXPERTS, floats * 4 + ints * 4 + 2 * e->num_experts * sizeof(Product) + 8);
    float *parts = gated + own * inner, *both = parts + own * hidden, *scaled = both + own * wide;
    int32_t *tokens = (int32_t *)(gated + floats), *places = tokens + num, *first = places + num;
    Product *gate_up = (Product *)(((uintptr_t)(first + e->router.num + 1) + 7) / 8 * 8);
    Product *down = gate_up + e->num_experts;

    /* Assignments are sorted by expert. */
    memset(first, 0, (e->router.num + 1) * sizeof *first);
    for (long i = 0; i < num; i++)
        if (ids[i] >= 0)
            first[ids[i] + 1]++;
    for (long i = 0; i < e->router.num; i++) {
        long rows = first[i + 1], from = first[i];
        first[i + 1] += first[i];
        if (!rows || i >= e->num_experts)
            continue;
        if (e->load)
            e->load[i] += rows;
        Activations inputs = {x, tokens + from, x_stride};
        if (e->scales_input)
            inputs = (Activations){scaled + from * width, 0, width};
        gate_up[count] = is_gated ? (Product){&e->gate_up[i], inputs, gated + from * inner, inner, rows, SILU_MUL}
                                  : (Product){&e->gate_up[i], inputs, both + from * wide, wide, rows, STORE};
        down[count++] = (Product){&e->down[i], {gated + from * inner, 0, inner}, parts + from * hidden, hidden, rows, STORE};
    }
    long rows = first[e->num_experts]; /* with matrices */
    for (long i = 0; i < num; i++)
        if (ids[i] >= 0) {
            places[i] = first[ids[i]]++;
            tokens[places[i]] = (int32_t)(i / top_k);
        }
    if (e->scales_input)
        run_rows(scale_inputs, &(ScaleInputs){x, weights, ids, places, scaled, x_stride, width, top_k}, num, width);
    pagewire_products(gate_up, count);
    if (!is_gated)
        pagewire_map(&(Map){{both, wide}, {both + inner, wide}, {gated, inner}, 0, e->map, inner, 0, e->act, e->alpha, 0,
                            e->limit},
                     rows);
    pagewire_products(down, count);
    return (Results){parts, places};
}

void pagewire_experts(const Experts *e, const float *weights, const int32_t *ids, const float *x, long x_stride,
                      float *y, long y_stride, long m, long adds)
{
    long hidden = e->down[0].n;
    Results r = compute(e, weights, ids, x, x_stride, m);
    run_rows(combine_rows, &(Combine){e, r.parts, weights, x, ids, r.places, y, x_stride, y_stride, hidden, adds}, m,
             hidden * e->router.top_k);
}

/* No attention runs at the same time. */
enum { SLOT_TOKENS = SLOT_ATTENTION, SLOT_REPLIES = SLOT_PARTS };

/* What a rank sends to another one, or gets from it. */
typedef struct {
    long rows, results; /* tokens, and their choices that the other rank computes */
    long first_row, first_result;
    long last; /* the token of the last row */
} Part;

/* What is sent of a token: its x, the slots of its choices on the rank that gets it, or -1, and where the experts need
 * them the weights. */
static long record_width(const Experts *e)
{
    return e->gate_up[0].k + e->router.top_k * (e->scales_input ? 2 : 1);
}

/* For each choice the rank that computes it and its slot there; -1 for experts without matrices. Counts what each rank
 * gets. */
static void find_holders(const Experts *e, const int32_t *ids, const int64_t *positions, int32_t *ranks, int32_t *slots,
                         Part *parts, long m)
{
    long top_k = e->router.top_k, stride = 1 + 2 * e->num_ranks;
    memset(parts, 0, e->num_ranks * sizeof *parts);
    for (long r = 0; r < e->num_ranks; r++)
        parts[r].last = -1;
    for (long i = 0; i < m * top_k; i++) {
        const int32_t *holders = e->holders + ids[i] * stride;
        ranks[i] = -1;
        if (!holders[0])
            continue;
        const int32_t *holder = holders + 1 + 2 * (positions[i / top_k] % holders[0]);
        ranks[i] = holder[0];
        slots[i] = holder[1];
        Part *part = parts + ranks[i];
        part->results++;
        part->rows += part->last != i / top_k;
        part->last = i / top_k;
    }
    for (long r = 0, row = 0, result = 0; r < e->num_ranks; row += parts[r].rows, result += parts[r].results, r++) {
        parts[r].first_row = row;
        parts[r].first_result = result;
        parts[r].last = -1;
    }
}

/* Writes the records for all ranks; places: of each choice among the results that will come back. */
static void write_records(const Experts *e, const float *x, long x_stride, const float *weights, const int32_t *ranks,
                          const int32_t *slots, Part *parts, float *records, int32_t *places, long m)
{
    long top_k = e->router.top_k, width = e->gate_up[0].k, record = record_width(e);
    for (long i = 0; i < m * top_k; i++) {
        long token = i / top_k;
        if (ranks[i] < 0)
            continue;
        Part *part = parts + ranks[i];
        float *row = records + (part->first_row - 1) * record;
        if (part->last != token) {
            row += record;
            part->first_row++;
            part->last = token;
            memcpy(row, x + token * x_stride, width * 4);
            memset(row + width, -1, top_k * 4);
            if (e->scales_input)
                memcpy(row + width + top_k, weights + token * top_k, top_k * 4);
        }
        memcpy(row + width + i % top_k, slots + i, 4);
        places[i] = (int32_t)part->first_result++;
    }
}

int pagewire_share_experts(const Experts *e, const Sum *ranks, const float *weights, const int32_t *ids,
                           const int64_t *positions, const float *x, long x_stride, float *y, long y_stride, long m,
                           long most, long adds)
{
    long hidden = e->down[0].n, width = e->gate_up[0].k, top_k = e->router.top_k, record = record_width(e);
    long size = e->num_ranks, num = m * top_k, rows = 0, results = 0, sent[size], got[size];
    Part parts[size];
    int32_t *choices = pagewire_scratch(SLOT_CHOICES, (3 * num + most * top_k) * 4 + most * top_k * 4);
    int32_t *slots = choices + num, *places = slots + num, *own = places + num;
    float *own_weights = (float *)(own + most * top_k);

    find_holders(e, ids, positions, choices, slots, parts, m);
    for (long r = 0; r < size; r++) {
        sent[r] = parts[r].rows * record * 4;
        rows += parts[r].rows;
        results += parts[r].results;
    }
    float *records = pagewire_scratch(SLOT_TOKENS, ((rows + most) * record + results * hidden) * 4);
    float *tokens = records + rows * record, *replies = tokens + most * record;
    write_records(e, x, x_stride, weights, choices, slots, parts, records, places, m);
    if (!pagewire_all_to_all(ranks, records, sent, tokens, got, most * record * 4))
        return 0;

    long num_own = 0, row = 0;
    for (long r = 0; r < size; r++) {
        sent[r] = 0;
        for (long last = row + got[r] / (record * 4); row < last; row++) {
            const float *choice = tokens + row * record + width;
            memcpy(own + row * top_k, choice, top_k * 4);
            memcpy(own_weights + row * top_k, choice + top_k, e->scales_input ? top_k * 4 : 0);
            for (long i = 0; i < top_k; i++)
                sent[r] += own[row * top_k + i] >= 0;
        }
        num_own += sent[r];
        sent[r] *= hidden * 4;
    }
    Results r = compute(e, own_weights, own, tokens, record, row);
    float *found = pagewire_scratch(SLOT_REPLIES, num_own * hidden * 4), *next = found;
    for (long i = 0; i < row * top_k; i++)
        if (own[i] >= 0) {
            memcpy(next, r.parts + r.places[i] * hidden, hidden * 4);
            next += hidden;
        }
    if (!pagewire_all_to_all(ranks, found, sent, replies, got, results * hidden * 4))
        return 0;
    for (long i = 0; i < num; i++)
        choices[i] = choices[i] < 0 ? (int32_t)e->num_experts : 0; /* what `combine_rows` takes for one without matrices */
    run_rows(combine_rows, &(Combine){e, replies, weights, x, choices, places, y, x_stride, y_stride, hidden, adds}, m,
             hidden * top_k);
    return 1;
}
