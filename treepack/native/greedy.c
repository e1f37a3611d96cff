/* Greedy allocation of rollouts; treepack/research/trace/greedy.py explains it. */

#include <stdint.h>

enum { FIRST_UNITS = 3 }; /* BLOCK in greedy.py */

typedef struct {
    double *worth; /* of each index */
    int64_t *heap; /* indices; the highest worth is on top, then the lowest index */
    int64_t num;
} Heap;

static int is_before(const Heap *heap, int64_t a, int64_t b) {
    return heap->worth[a] > heap->worth[b] || (heap->worth[a] == heap->worth[b] && a < b);
}

static void sift_down(Heap *heap, int64_t at) {
    int64_t moved = heap->heap[at];
    for (int64_t child; (child = 2 * at + 1) < heap->num; at = child) {
        if (child + 1 < heap->num && is_before(heap, heap->heap[child + 1], heap->heap[child])) child++;
        if (is_before(heap, moved, heap->heap[child])) break;
        heap->heap[at] = heap->heap[child];
    }
    heap->heap[at] = moved;
}

static void heapify(Heap *heap) {
    for (int64_t at = heap->num / 2 - 1; at >= 0; at--) sift_down(heap, at);
}

/* powers [2, prompts] begins as value and 1 - value, count [prompts] as 0; worth and places [prompts] are scratch. */
int64_t spend_on_roots(const double *value, int64_t num, const int64_t *maximum, int64_t num_maxima, int64_t budget,
                       double *powers, int64_t num_powers, double *worth, int64_t num_worth, int64_t *places,
                       int64_t num_places, int64_t *count, int64_t num_counts) {
    (void)num_maxima, (void)num_powers, (void)num_worth, (void)num_places, (void)num_counts;
    double *first = powers, *second = powers + num;
    Heap heap = {worth, places, 0};
    for (int64_t i = 0; i < num; i++) {
        worth[i] = value[i] * (1.0 - value[i]);
        if (maximum[i] >= 2) places[heap.num++] = i;
    }
    heapify(&heap);
    int64_t left = budget;
    while (left > 0 && heap.num > 0) {
        int64_t i = places[0], units = 1;
        if (count[i] == 0) {
            if (left == 1) break;
            units = maximum[i] < FIRST_UNITS ? maximum[i] : FIRST_UNITS;
            if (left < units) units = left;
        }
        count[i] += units;
        left -= units;
        if (count[i] == maximum[i]) {
            places[0] = places[--heap.num];
        } else {
            first[i] *= value[i];
            second[i] *= 1.0 - value[i];
            double sum = first[i] + second[i];
            worth[i] = value[i] * (1.0 - value[i]) * (sum < 1.0 ? sum : 1.0);
        }
        if (heap.num) sift_down(&heap, 0);
    }
    return left;
}

/* worth [prefixes] begins as flip, count [prefixes] as 0; places [prefixes] is scratch. */
void spend_on_prefixes(const double *flip, int64_t num, const int64_t *start, int64_t num_starts, const int64_t *budget,
                       int64_t num_groups, double *worth, int64_t num_worth, int64_t *places, int64_t num_places,
                       int64_t *count, int64_t num_counts) {
    (void)num, (void)num_starts, (void)num_worth, (void)num_places, (void)num_counts;
    for (int64_t g = 0; g < num_groups; g++) {
        if (budget[g] <= 0) continue;
        Heap heap = {worth, places, 0};
        for (int64_t i = start[g]; i < start[g + 1]; i++) places[heap.num++] = i;
        heapify(&heap);
        for (int64_t unit = 0; unit < budget[g]; unit++) {
            int64_t i = places[0];
            count[i]++;
            worth[i] *= 1.0 - flip[i];
            sift_down(&heap, 0);
        }
    }
}
