/* Counting along a tree; treepack/pack/plan/bounds/counting.py explains it. */

#include <stdint.h>

enum { MAX_ITEMS_PER_BIN = 16, MAX_THRESHOLDS = 32 }; /* as in counting.py */

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; } /* a >= 0, b > 0 */

static int64_t min_bins(const int64_t *sizes, const int64_t *copies, int64_t num, int64_t room) {
    int64_t bound = 0;
    for (int64_t per_bin = 1; per_bin <= MAX_ITEMS_PER_BIN; per_bin++) {
        int64_t count = 0;
        for (int64_t i = 0; i < num; i++) count += sizes[i] * (per_bin + 1) > room ? copies[i] : 0;
        bound = larger(bound, divide_up(count, per_bin));
    }
    int64_t step = larger(1, num / MAX_THRESHOLDS);
    for (int64_t t = 0; t < num; t += step) {
        int64_t threshold = sizes[t], large = 0, spare = 0, small = 0;
        if (2 * threshold > room) continue;
        for (int64_t i = 0; i < num; i++) {
            if (2 * sizes[i] > room) {
                large += copies[i];
                if (sizes[i] <= room - threshold) spare += copies[i] * (room - sizes[i]);
            } else if (sizes[i] >= threshold) {
                small += copies[i] * sizes[i];
            }
        }
        bound = larger(bound, large + (small > spare ? divide_up(small - spare, room) : 0));
    }
    return bound;
}

/* shortest [nodes] begins as the size of each node; items [2 * nodes] is scratch. */
void count_up(const int64_t *end, int64_t nodes, const int64_t *size, int64_t num_sizes, const int64_t *stop,
              int64_t num_stops, int64_t capacity, int64_t *tokens, int64_t num_tokens, int64_t *times,
              int64_t num_times, int64_t *shortest, int64_t num_shortest, int64_t *items, int64_t num_items) {
    (void)num_sizes, (void)num_stops, (void)num_tokens, (void)num_times, (void)num_shortest, (void)num_items;
    int64_t *sizes = items, *copies = items + nodes;
    for (int64_t node = nodes - 1; node >= 0; node--) {
        int64_t below = 0, children = 0, shortest_below = capacity;
        for (int64_t child = node + 1; child < end[node]; child = end[child], children++) {
            below += tokens[child];
            times[node] = larger(times[node], times[child]);
            shortest_below = smaller(shortest_below, shortest[child]);
            sizes[children] = shortest[child];
            copies[children] = times[child];
        }
        if (children) {
            int64_t left = capacity - stop[node];
            if (below && left) times[node] = larger(times[node], divide_up(below, left));
            shortest[node] += shortest_below;
            times[node] = larger(times[node], min_bins(sizes, copies, children, left));
        }
        tokens[node] = larger(tokens[node], below + size[node] * times[node]);
    }
}

/* order sorts the leaves by row; last [nodes] begins as -1, used [nodes] as 0. */
void count_rows(const int64_t *parent, int64_t nodes, const int64_t *leaf, int64_t num_leaves, const int64_t *rows,
                int64_t num_rows, const int64_t *order, int64_t num, int64_t *last, int64_t num_last, int64_t *used,
                int64_t num_used) {
    (void)nodes, (void)num_leaves, (void)num_rows, (void)num_last, (void)num_used;
    for (int64_t i = 0; i < num; i++) {
        int64_t row = rows[order[i]];
        for (int64_t node = leaf[order[i]]; node >= 0 && last[node] != row; node = parent[node]) {
            last[node] = row;
            used[node]++;
        }
    }
}
