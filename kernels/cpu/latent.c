/* The products of multi-head latent attention, a pair of matrices for each head, and its cache; see latent.h. */
#include "latent.h"

enum { FEW = 4096 }; /* numbers that one thread copies faster than another takes a task */

typedef struct {
    const Latent *latent;
    const float *q;
    long q_stride;
    float *out;
    long m, size; /* tokens of a task */
} Copy;

/* The turned part of queries, and the zeros after it. */
static void copy_tokens(const void *about, long i)
{
    const Copy *c = about;
    const Latent *a = c->latent;
    long end = (i + 1) * c->size, rest = a->width - a->rank - a->rope;
    end = end < c->m ? end : c->m;
    for (long t = i * c->size; t < end; t++)
        for (long h = 0; h < a->heads; h++) {
            const float *q = c->q + t * c->q_stride + h * (a->nope + a->rope) + a->nope;
            float *out = c->out + (t * a->heads + h) * a->width + a->rank;
            memcpy(out, q, a->rope * 4);
            memset(out + a->rope, 0, rest * 4);
        }
}

void pagewire_absorb(const Latent *a, const float *q, long q_stride, float *out, long m)
{
    Product products[a->heads];
    for (long h = 0; h < a->heads; h++)
        products[h] = (Product){a->keys + h, {q + h * (a->nope + a->rope), 0, q_stride}, out + h * a->width,
                                a->heads * a->width, m, STORE};
    pagewire_products(products, a->heads);
    Copy copy = {a, q, q_stride, out, m, task_size(m, 1, FEW / (a->heads * (a->width - a->rank) + 1) + 1)};
    pagewire_run((m + copy.size - 1) / copy.size, copy_tokens, &copy);
}

void pagewire_expand(const Latent *a, const float *attended, float *out, long out_stride, long m)
{
    Product products[a->heads];
    for (long h = 0; h < a->heads; h++)
        products[h] = (Product){a->values + h, {attended + h * a->width, 0, a->heads * a->width},
                                out + h * a->value, out_stride, m, STORE};
    pagewire_products(products, a->heads);
}

typedef struct {
    const Latent *layer;
    const Pages *pages;
    const float *latent, *key;
    long latent_stride, key_stride;
    const int64_t *slots;
    long m, size; /* tokens of a task */
} Write;

static void write_tokens(const void *about, long i)
{
    const Write *w = about;
    const Latent *a = w->layer;
    const Pages *p = w->pages;
    long end = (i + 1) * w->size, bytes = p->bf16 ? 2 : 4;
    float row[a->width];
    memset(row, 0, a->width * 4);
    end = end < w->m ? end : w->m;
    for (long t = i * w->size; t < end; t++) {
        char *page = (char *)p->keys + w->slots[t] / p->block_size * p->page_stride;
        char *to = page + w->slots[t] % p->block_size * a->width * bytes;
        memcpy(row, w->latent + t * w->latent_stride, a->rank * 4);
        memcpy(row + a->rank, w->key + t * w->key_stride, a->rope * 4);
        if (p->bf16)
            for (long j = 0; j < a->width; j += LANES)
                store_bf16(*(const vf_any *)(row + j), to + 2 * j);
        else
            memcpy(to, row, a->width * 4);
    }
}

void pagewire_write_latent(const Latent *a, const Pages *p, const float *latent, long latent_stride, const float *key,
                           long key_stride, const int64_t *slots, long m)
{
    Write write = {a, p, latent, key, latent_stride, key_stride, slots, m, task_size(m, 1, FEW / a->width + 1)};
    pagewire_run((m + write.size - 1) / write.size, write_tokens, &write);
}
