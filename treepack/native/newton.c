/* The Newton matrix of column generation; treepack/pack/plan/bounds/column_generation.py explains it. */

#include <stdint.h>

/* matrix [size, size]; row r has the columns index[starts[r]:starts[r + 1]] with the amounts at the same places. */
void add_outer_products(const int64_t *starts, int64_t num_starts, const int64_t *index, int64_t num_index,
                        const double *amounts, int64_t num_amounts, const double *weights, int64_t num_rows,
                        double *matrix, int64_t num_entries, int64_t size) {
    (void)num_starts, (void)num_index, (void)num_amounts, (void)num_entries;
    for (int64_t row = 0; row < num_rows; row++) {
        for (int64_t i = starts[row]; i < starts[row + 1]; i++) {
            double *line = matrix + index[i] * size, factor = weights[row] * amounts[i];
            for (int64_t j = starts[row]; j < starts[row + 1]; j++) line[index[j]] += factor * amounts[j];
        }
    }
}
