/* Minimum cost of rows for every set of leaves; treepack/pack/plan/methods/subsets.py explains it. */

#include <stdint.h>

void best_of_sets(const int64_t *cost, int64_t num_sets, const uint8_t *fits, int64_t num_fits, int64_t *best,
                  int64_t num_best, int64_t *first_row, int64_t num_first) {
    (void)num_fits, (void)num_best, (void)num_first;
    best[0] = first_row[0] = 0;
    for (int64_t whole = 1; whole < num_sets; whole++) {
        int64_t others = whole & (whole - 1), minimum = INT64_C(1) << 62;
        first_row[whole] = 0;
        for (int64_t rest = others;; rest = (rest - 1) & others) { /* all subsets of others, descending */
            int64_t row = whole ^ rest;
            if (fits[row] && cost[row] + best[rest] < minimum) {
                minimum = cost[row] + best[rest];
                first_row[whole] = row;
            }
            if (!rest) break;
        }
        best[whole] = minimum;
    }
}
