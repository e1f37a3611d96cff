/* Ruin and recreate; treepack/pack/plan/methods/anneal.py explains it. */

#include <math.h>
#include <stdint.h>

#define SKIP_PROBABILITY 0.01 /* as in anneal.py */
#define FIRST_TEMPERATURE 0.5
enum { MAX_ROWS_TORN = 4, MAX_STRING_LEAVES = 10, MAX_REMOVED = MAX_ROWS_TORN * MAX_STRING_LEAVES };

typedef struct {
    const int64_t *parent, *jump, *stop, *pairs; /* by node */
    const int64_t *leaf, *terms, *shared;        /* by leaf */
    int64_t nodes, leaves;
} Shape;

typedef struct {
    int64_t *row_of, *passing;
    int32_t *through; /* [nodes, num] */
    int64_t *tokens, *pairs, *terms, *leaves;
    int64_t num;
    uint64_t random;
} Rows;

/* xorshift64*; the high 53 bits over 2**53 */
static double next_random(Rows *rows) {
    uint64_t x = rows->random;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    rows->random = x;
    return (double)((x * UINT64_C(2685821657736338717)) >> 11) / 9007199254740992.0;
}

static void change(const Shape *shape, Rows *rows, int64_t k, int64_t row, int64_t node, int64_t sign) {
    int64_t end = shape->leaf[k];
    rows->tokens[row] += sign * (shape->stop[end] - (node >= 0 ? shape->stop[node] : 0));
    rows->pairs[row] += sign * (shape->pairs[end] - (node >= 0 ? shape->pairs[node] : 0));
    rows->terms[row] += sign * shape->terms[k];
    rows->leaves[row] += sign;
}

static void put(const Shape *shape, Rows *rows, int64_t k, int64_t row) {
    int64_t node = shape->leaf[k];
    while (node >= 0 && ++rows->through[node * rows->num + row] == 1) {
        rows->passing[node]++;
        node = shape->parent[node];
    }
    change(shape, rows, k, row, node, 1);
    rows->row_of[k] = row;
}

static void take(const Shape *shape, Rows *rows, int64_t k) {
    int64_t node = shape->leaf[k], row = rows->row_of[k];
    while (node >= 0 && --rows->through[node * rows->num + row] == 0) {
        rows->passing[node]--;
        node = shape->parent[node];
    }
    change(shape, rows, k, row, node, -1);
    rows->row_of[k] = -1;
}

static int64_t tear(const Shape *shape, Rows *rows, int64_t *removed, int64_t *was_in) {
    int64_t num = shape->leaves, low = (int64_t)(next_random(rows) * (double)num), high = low + 1, at = low, count = 0;
    int64_t longest = 1 + (int64_t)(next_random(rows) * MAX_STRING_LEAVES);
    int64_t target = 1 + (int64_t)(next_random(rows) * MAX_ROWS_TORN);
    int64_t torn[MAX_ROWS_TORN], num_torn = 0;
    for (;;) {
        int64_t row = rows->row_of[at], is_new = row >= 0;
        for (int64_t i = 0; i < num_torn; i++) is_new = is_new && torn[i] != row;
        if (is_new) {
            torn[num_torn++] = row;
            int64_t size = 1 + (int64_t)(next_random(rows) * (double)longest);
            if (rows->leaves[row] < size) size = rows->leaves[row];
            int64_t left = (int64_t)(next_random(rows) * (double)size), begin = at, num_leaves = 0;
            for (int64_t j = at; j >= 0 && num_leaves <= left; j--)
                if (rows->row_of[j] == row) begin = j, num_leaves++;
            num_leaves = 0;
            for (int64_t j = begin; j < num && num_leaves < size; j++)
                if (rows->row_of[j] == row) {
                    take(shape, rows, j);
                    removed[count] = j, was_in[count] = row;
                    count++, num_leaves++;
                }
        }
        if (num_torn == target || (low == 0 && high == num)) return count;
        if (high == num || (low > 0 && shape->shared[low] > shape->shared[high])) at = --low;
        else at = high++;
    }
}

static int64_t best_row(const Shape *shape, Rows *rows, const int64_t *caps, int64_t k) {
    int64_t end = shape->leaf[k], seen = 0;
    for (int64_t node = end; node >= 0;) {
        if (rows->passing[node] == seen) {
            int64_t far = shape->jump[node];
            node = far >= 0 && rows->passing[far] == seen ? far : shape->parent[node];
            continue;
        }
        seen = rows->passing[node];
        int64_t tokens = shape->stop[end] - shape->stop[node], pairs = shape->pairs[end] - shape->pairs[node];
        int64_t best = -1, best_tokens = -1;
        const int32_t *through = rows->through + node * rows->num;
        for (int64_t row = 0; row < rows->num; row++) {
            if (!through[row] || rows->tokens[row] <= best_tokens || rows->tokens[row] + tokens > caps[0]) continue;
            if (rows->pairs[row] + pairs > caps[1] || rows->terms[row] + shape->terms[k] > caps[2]) continue;
            if (next_random(rows) >= SKIP_PROBABILITY) best = row, best_tokens = rows->tokens[row];
            else seen = -1;
        }
        if (best >= 0) return best;
        node = shape->parent[node];
    }
    for (int64_t row = 0; row < rows->num; row++)
        if (rows->leaves[row] == 0) return row;
    return -1;
}

static int put_back(const Shape *shape, Rows *rows, const int64_t *caps, const int64_t *removed, int64_t num) {
    double keys[MAX_REMOVED];
    int64_t sorted[MAX_REMOVED], order = (int64_t)(next_random(rows) * 4);
    for (int64_t i = 0; i < num; i++) { /* insertion sort, so equal keys keep their order */
        int64_t k = removed[i], at = i;
        double key = order == 0   ? next_random(rows)
                     : order == 1 ? (double)-shape->stop[shape->leaf[k]]
                     : order == 2 ? (double)k
                                  : (double)-k;
        for (; at > 0 && keys[at - 1] > key; at--) keys[at] = keys[at - 1], sorted[at] = sorted[at - 1];
        keys[at] = key, sorted[at] = k;
    }
    for (int64_t i = 0; i < num; i++) {
        int64_t row = best_row(shape, rows, caps, sorted[i]);
        if (row < 0) return 0;
        put(shape, rows, sorted[i], row);
    }
    return 1;
}

static int64_t cost_of(const Rows *rows, int64_t scale) {
    int64_t tokens = 0, num = 0;
    for (int64_t row = 0; row < rows->num; row++) tokens += rows->tokens[row], num += rows->leaves[row] > 0;
    return tokens * scale + num;
}

/* by_node [4, nodes] and by_leaf [3, leaves] are a Shape; through, passing and by_row [4, rows] begin as 0. */
void anneal_rows(const int64_t *by_node, int64_t num_by_node, const int64_t *by_leaf, int64_t num_by_leaf,
                 const int64_t *caps, int64_t num_caps, int32_t *through, int64_t num_through, int64_t *passing,
                 int64_t num_passing, int64_t *by_row, int64_t num_by_row, int64_t *row_of, int64_t num_row_of,
                 int64_t *best_rows, int64_t num_best, int64_t steps, double factor, int64_t seed) {
    (void)num_caps, (void)num_through, (void)num_passing, (void)num_row_of, (void)num_best;
    int64_t nodes = num_by_node / 4, leaves = num_by_leaf / 3, num = num_by_row / 4;
    const Shape shape = {by_node, by_node + nodes, by_node + 2 * nodes, by_node + 3 * nodes,
                         by_leaf, by_leaf + leaves, by_leaf + 2 * leaves, nodes, leaves};
    Rows rows = {row_of, passing, through, by_row, by_row + num, by_row + 2 * num, by_row + 3 * num, num,
                 UINT64_C(88172645463325252) + UINT64_C(2654435761) * (uint64_t)(seed + 1)};
    for (int64_t k = 0; k < leaves; k++) {
        best_rows[k] = row_of[k];
        put(&shape, &rows, k, row_of[k]);
    }
    int64_t scale = leaves + 1, cost = cost_of(&rows, scale), best = cost, tokens = 0;
    for (int64_t row = 0; row < num; row++) tokens += rows.tokens[row];
    double heat = FIRST_TEMPERATURE * (double)scale * (double)tokens / (double)nodes;
    int64_t removed[MAX_REMOVED], was_in[MAX_REMOVED];
    for (int64_t step = 0; step < steps; step++) {
        heat *= factor;
        int64_t count = tear(&shape, &rows, removed, was_in);
        int is_complete = put_back(&shape, &rows, caps, removed, count);
        int64_t new_cost = cost_of(&rows, scale);
        if (is_complete && (double)new_cost < (double)cost - heat * log(1 - next_random(&rows))) {
            cost = new_cost;
            if (cost < best) {
                best = cost;
                for (int64_t k = 0; k < leaves; k++) best_rows[k] = row_of[k];
            }
        } else {
            for (int64_t i = 0; i < count; i++)
                if (row_of[removed[i]] >= 0) take(&shape, &rows, removed[i]);
            for (int64_t i = 0; i < count; i++) put(&shape, &rows, removed[i], was_in[i]);
        }
    }
}
