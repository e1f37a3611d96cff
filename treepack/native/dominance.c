/* States that no other state dominates; treepack/pack/plan/methods/dominance.py explains them. */

#include <stdint.h>

/* rooms [num, width]; candidates [num] is scratch; best [num] is set to 1 for a row that is not <= an earlier one in every place. */
void best_of(const int64_t *rooms, int64_t num_values, int64_t compared, int64_t *candidates, int64_t num,
             uint8_t *best, int64_t num_best) {
    (void)num_best;
    int64_t width = num ? num_values / num : 0;
    int64_t num_candidates = 0;
    for (int64_t i = 0; i < num; i++) {
        int64_t end = num_candidates < compared ? num_candidates : compared;
        int is_dominated = 0;
        for (int64_t at = 0; at < end && !is_dominated; at++) {
            int64_t j = candidates[at], k = 0;
            while (k < width && rooms[j * width + k] >= rooms[i * width + k]) k++;
            if (k == width) { /* a row that rules out others moves forward, so that it is compared sooner */
                candidates[at] = candidates[at / 2];
                candidates[at / 2] = j;
                is_dominated = 1;
            }
        }
        best[i] = !is_dominated;
        if (!is_dominated) candidates[num_candidates++] = i;
    }
}
