/* First fit over all rows of a forest; treepack/pack/plan/methods/first_fit.py explains it. */

#include <stdint.h>

enum { BLOCK = 16 }; /* as in first_fit.py */
enum { COUNT, MIN_LOAD, NEXT, FIELDS };

/* Loads and paths, one line per limit: load [limits, 2 * size], path [limits, nodes]. */
typedef struct {
    int64_t *load, size, num_limits;
    const int64_t *limit, *path;
    int64_t nodes;
} Loads;

static int64_t first_at_most(const int64_t *minima, int64_t size, int64_t most, int64_t start) {
    int64_t at = start + size;
    while (minima[at] > most) {
        while (at % 2 == 1) at /= 2;
        at++;
    }
    while (at < size) {
        at *= 2;
        if (minima[at] > most) at++;
    }
    return at - size;
}

static int64_t first_with_room(const Loads *loads, int64_t node) {
    int64_t row = 0;
    for (int agreed = 0; !agreed;) {
        agreed = 1;
        for (int64_t kind = 0; kind < loads->num_limits; kind++) {
            int64_t most = loads->limit[kind] - loads->path[kind * loads->nodes + node];
            int64_t candidate = first_at_most(loads->load + kind * 2 * loads->size, loads->size, most, row);
            if (candidate != row) row = candidate, agreed = 0;
        }
    }
    return row;
}

static int has_room(const Loads *loads, int64_t row, int64_t node, int64_t common) {
    for (int64_t kind = 0; kind < loads->num_limits; kind++) {
        const int64_t *path = loads->path + kind * loads->nodes;
        int64_t load = loads->load[(2 * kind + 1) * loads->size + row];
        if (load + path[node] - path[common] > loads->limit[kind]) return 0;
    }
    return 1;
}

static void add(Loads *loads, int64_t row, int64_t node, int64_t common) {
    for (int64_t kind = 0; kind < loads->num_limits; kind++) {
        int64_t *minima = loads->load + kind * 2 * loads->size, at = loads->size + row;
        const int64_t *path = loads->path + kind * loads->nodes;
        minima[at] += path[node] - (common >= 0 ? path[common] : 0);
        for (at /= 2; at >= 1; at /= 2) {
            int64_t left = minima[2 * at], right = minima[2 * at + 1];
            minima[at] = left < right ? left : right;
        }
    }
}

static void refresh(int32_t *rows, int64_t *block, const int64_t *load, int64_t most) {
    int64_t count = 0;
    block[MIN_LOAD] = INT64_MAX;
    for (int64_t i = 0; i < block[COUNT]; i++) {
        int32_t row = rows[i];
        if (load[row] <= most) {
            rows[count++] = row;
            if (load[row] < block[MIN_LOAD]) block[MIN_LOAD] = load[row];
        }
    }
    block[COUNT] = count;
}

/* progress [leaves placed, blocks in use, tokens]; returns before a leaf whose path could need more blocks than there
   are, or after the tokens exceed max_tokens. */
void place_leaves(const int64_t *order, int64_t num, const int64_t *leaf, int64_t num_leaves, const int64_t *parent,
                  int64_t nodes, const int64_t *path, int64_t num_paths, const int64_t *min_below, int64_t num_below,
                  const int64_t *limit, int64_t num_limits, int64_t *head, int64_t num_heads, int64_t *load,
                  int64_t num_loads, int32_t *rows, int64_t num_entries, int64_t *blocks, int64_t num_fields,
                  int64_t *seen, int64_t num_seen, int64_t *row_of, int64_t num_row_of, int64_t *progress,
                  int64_t num_progress, int64_t max_tokens) {
    (void)num_leaves, (void)num_paths, (void)num_below, (void)num_heads, (void)num_entries, (void)num_row_of;
    (void)num_progress;
    Loads loads = {load, num_loads / num_limits / 2, num_limits, limit, path, nodes};
    int64_t max_blocks = num_fields / FIELDS, *seen_at = seen + num_seen / 2;
    for (int64_t turn = progress[0]; turn < num; turn++) {
        int64_t node = leaf[order[turn]], on_path = 0;
        for (int64_t up = parent[node]; up >= 0; up = parent[up]) on_path++;
        if (progress[1] + on_path > max_blocks) return;
        int64_t row = first_with_room(&loads, node);
        for (int64_t up = parent[node]; up >= 0; up = parent[up]) {
            int64_t room = limit[0] - path[node] + path[up], before = -1;
            for (int64_t at = head[up], after; at >= 0; at = after) {
                int64_t *block = blocks + at * FIELDS;
                after = block[NEXT];
                if (block[MIN_LOAD] <= room) {
                    refresh(rows + at * BLOCK, block, load + loads.size, limit[0] - min_below[up]);
                    for (int64_t i = 0; i < block[COUNT]; i++) {
                        int64_t candidate = rows[at * BLOCK + i];
                        if (seen[candidate] == turn) continue;
                        seen[candidate] = turn, seen_at[candidate] = up;
                        if (candidate < row && has_room(&loads, candidate, node, up)) row = candidate;
                    }
                }
                if (block[COUNT] > 0) before = at;
                else if (before >= 0) blocks[before * FIELDS + NEXT] = after;
                else head[up] = after;
            }
        }
        int64_t common = seen[row] == turn ? seen_at[row] : -1;
        row_of[turn] = row;
        add(&loads, row, node, common);
        int64_t new_load = load[loads.size + row];
        for (int64_t up = parent[node]; up != common; up = parent[up]) {
            int64_t at = head[up];
            if (at < 0 || blocks[at * FIELDS + COUNT] == BLOCK) {
                int64_t *fresh = blocks + progress[1] * FIELDS;
                fresh[COUNT] = 0, fresh[MIN_LOAD] = new_load, fresh[NEXT] = at;
                at = head[up] = progress[1]++;
            }
            int64_t *block = blocks + at * FIELDS;
            rows[at * BLOCK + block[COUNT]++] = (int32_t)row;
            if (new_load < block[MIN_LOAD]) block[MIN_LOAD] = new_load;
        }
        progress[0] = turn + 1;
        progress[2] += path[node] - (common >= 0 ? path[common] : 0);
        if (progress[2] > max_tokens) return;
    }
}
