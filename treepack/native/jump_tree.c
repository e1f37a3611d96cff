/* The tree of some leaves, with jumps; treepack/pack/plan/methods/jump_tree.py explains it. */

#include <stdint.h>

/* parent and stop [2 * leaves] get an entry per node; path [leaves + 1] is scratch. Returns the number of nodes. */
int64_t split_paths(const int64_t *lengths, int64_t num, const int64_t *shared, int64_t num_shared, int64_t *parent,
                    int64_t num_parents, int64_t *stop, int64_t num_stops, int64_t *leaf, int64_t num_leaves,
                    int64_t *path, int64_t num_path) {
    (void)num_shared, (void)num_parents, (void)num_stops, (void)num_leaves, (void)num_path;
    int64_t depth = 0, made = 0;
    for (int64_t k = 0; k < num; k++) {
        int64_t last = -1;
        while (depth && stop[path[depth - 1]] > shared[k]) last = path[--depth];
        int64_t above = depth ? path[depth - 1] : -1;
        if (last >= 0 && shared[k] > (above >= 0 ? stop[above] : 0)) {
            parent[made] = above, stop[made] = shared[k];
            parent[last] = above = made;
            path[depth++] = made++;
        }
        parent[made] = above, stop[made] = lengths[k];
        leaf[k] = path[depth++] = made++;
    }
    return made;
}

/* order has parents before their children; jump [nodes] begins as -1, depth [nodes] as 0. */
void set_jumps(const int64_t *order, int64_t num, const int64_t *parent, int64_t num_parents, int64_t *jump,
               int64_t num_jumps, int64_t *depth, int64_t num_depths) {
    (void)num_parents, (void)num_jumps, (void)num_depths;
    for (int64_t i = 0; i < num; i++) {
        int64_t node = order[i], up = parent[node];
        if (up < 0) continue;
        int64_t far = jump[up];
        depth[node] = depth[up] + 1;
        jump[node] = up;
        if (far >= 0 && jump[far] >= 0 && depth[up] - depth[far] == depth[far] - depth[jump[far]]) jump[node] = jump[far];
    }
}
