/* The most profitable row of a tree; treepack/pack/plan/bounds/knapsack.py explains it. */

#include <stdint.h>
#include <string.h>

/* table [nodes + 1, width] */
void fill_table(const int64_t *sizes, int64_t nodes, const int32_t *profits, int64_t num_profits, const int64_t *end,
                int64_t num_ends, int32_t *table, int64_t num_entries) {
    (void)num_profits, (void)num_ends;
    int64_t width = num_entries / (nodes + 1);
    memset(table + nodes * width, 0, (size_t)width * sizeof *table);
    for (int64_t i = nodes - 1; i >= 0; i--) {
        const int32_t *restrict taking = table + (i + 1) * width, *restrict leaving = table + end[i] * width;
        int32_t *restrict out = table + i * width;
        int64_t size = sizes[i] < width ? sizes[i] : width;
        int32_t profit = profits[i];
        memcpy(out, leaving, (size_t)size * sizeof *out);
        for (int64_t room = size; room < width; room++) {
            int32_t with = taking[room - size] + profit;
            out[room] = with > leaving[room] ? with : leaving[room];
        }
    }
}

/* taken [nodes] begins as 0. */
void mark_best_row(const int64_t *sizes, int64_t nodes, const int64_t *end, int64_t num_ends, const int32_t *table,
                   int64_t num_entries, uint8_t *taken, int64_t num_taken) {
    (void)num_ends, (void)num_taken;
    int64_t width = num_entries / (nodes + 1), room = width - 1, i = 0;
    while (i < nodes) {
        if (room >= sizes[i] && table[i * width + room] != table[end[i] * width + room]) {
            taken[i] = 1;
            room -= sizes[i++];
        } else {
            i = end[i];
        }
    }
}
