/* Cut lists of integers out of one line of JSON; treepack/ingest/readers/integer_lists.py explains the function.

   Nothing here decides if a line is valid JSON. All bytes but the lists reach `rest`, which a JSON parser reads next,
   and a list of another form than the plain one stays in `rest`. */

#include <stdint.h>
#include <string.h>

static int is_space(uint8_t byte) { return byte == ' ' || byte == '\t' || byte == '\r' || byte == '\n'; }

static const uint8_t *after_space(const uint8_t *at, const uint8_t *end) {
    while (at < end && is_space(*at)) at++;
    return at;
}

/* Returns the closing quote of the string that opens before `at`, or NULL. */
static const uint8_t *end_of_string(const uint8_t *at, const uint8_t *end) {
    const uint8_t *start = at;
    while ((at = memchr(at, '"', (size_t)(end - at)))) {
        const uint8_t *before = at;
        while (before > start && before[-1] == '\\') before--;
        if ((at - before) % 2 == 0) return at; /* \\" closes the string, \" and \\\" do not */
        at++;
    }
    return NULL;
}

/* Returns the first comma or brace after the value at `at`, at its depth, or NULL. */
static const uint8_t *end_of_value(const uint8_t *at, const uint8_t *end) {
    int64_t depth = 0;
    for (; at < end; at++) {
        if (*at == '"') {
            if (!(at = end_of_string(at + 1, end))) return NULL;
        } else if (*at == '[' || *at == '{') {
            depth++;
        } else if (*at == ']' || *at == '}') {
            if (depth == 0) return *at == '}' ? at : NULL;
            depth--;
        } else if (*at == ',' && depth == 0) {
            return at;
        }
    }
    return NULL;
}

#if defined(__GNUC__) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
/* Reads "0,1,1,0," to 0 1 1 0; returns 0 if the 8 bytes are of another form. */
static int four_flags(const uint8_t *at, int32_t *values) {
    uint64_t bytes;
    memcpy(&bytes, at, 8);
    bytes ^= 0x2c302c302c302c30u; /* "0," -> 0 0, "1," -> 1 0, the first byte in the lowest bits */
    if (bytes & 0xfffefffefffefffeu) return 0;
    for (int i = 0; i < 4; i++) values[i] = (int32_t)(bytes >> 16 * i & 1);
    return 4;
}

/* Returns the number of digits, at most 7, at the start of 8 bytes and sets `value` to their number; 0 if it cannot tell. */
static int short_number(const uint8_t *at, int32_t *value) {
    uint64_t bytes;
    memcpy(&bytes, at, 8);
    bytes ^= 0x3030303030303030u; /* "42,7.." -> 4 2 28 7 .., the first digit in the lowest byte */
    /* The sum sets the high bit of each byte above 9. A carry changes only bytes after the first of these. */
    uint64_t others = ((bytes + 0x7676767676767676u) | bytes) & 0x8080808080808080u;
    if (!others) return 0;
    int num_digits = __builtin_ctzll(others) >> 3;
    if (num_digits == 0) return 0;
    bytes <<= 64 - 8 * num_digits;   /* 4 2 -> 0 0 0 0 0 0 4 2 */
    bytes = bytes * 10 + (bytes >> 8); /* pairs of digits: bytes 0, 2, 4, 6 are 0 0 0 42 */
    uint64_t high = (bytes & 0x000000ff000000ffu) * 0x000f424000000064u; /* 100 + (1000000 << 32) */
    uint64_t low = ((bytes >> 16) & 0x000000ff000000ffu) * 0x0000271000000001u; /* 1 + (10000 << 32) */
    *value = (int32_t)((high + low) >> 32);
    return num_digits;
}
#else
static int four_flags(const uint8_t *at, int32_t *values) {
    (void)at, (void)values;
    return 0;
}

static int short_number(const uint8_t *at, int32_t *value) {
    (void)at, (void)value;
    return 0;
}
#endif

/* Writes the integers of the flat list between its brackets `at - 1` and `close`; returns their number, or -1 if one is
   no plain integer of 32 bits. Every loop ends at `close`, because a bracket is no part of a number. */
static int64_t integers(const uint8_t *at, const uint8_t *close, int32_t *values) {
    int64_t num = 0;
    for (;;) {
        at += *at == ' '; /* the only space that json.dumps writes */
        if (close - at >= 8 && four_flags(at, values + num)) { /* of a mask */
            num += 4;
            at += 8;
            continue;
        }
        if ((uint8_t)(*at - '0') <= 9 && at[1] == ',') {
            values[num++] = *at - '0';
            at += 2;
            continue;
        }
        int num_digits = close - at < 8 ? 0 : short_number(at, &values[num]);
        if (num_digits && at[num_digits] == ',' && *at != '0') {
            num++;
            at += num_digits + 1;
            continue;
        }
        at = after_space(at, close);
        int is_negative = *at == '-';
        at += is_negative;
        const uint8_t *start = at;
        int64_t value = 0;
        while ((uint8_t)(*at - '0') <= 9 && at - start < 11) value = value * 10 + (*at++ - '0');
        if (at == start || (*start == '0' && (is_negative || at - start > 1))) return -1; /* "", -0 and 007 */
        value = is_negative ? -value : value;
        if (value < INT32_MIN || value > INT32_MAX) return -1;
        values[num++] = (int32_t)value;
        at = after_space(at, close);
        if (at == close) return num;
        if (*at++ != ',') return -1;
    }
}

/* Returns the index of the name that equals the bytes [start, end), or -1; each name ends with a zero. */
static int64_t index_of_name(const uint8_t *start, const uint8_t *end, const uint8_t *names, int64_t num_names) {
    const uint8_t *name = names, *end_names = names + num_names;
    for (int64_t index = 0; name < end_names; index++) {
        const uint8_t *zero = memchr(name, 0, (size_t)(end_names - name));
        if (!zero) return -1;
        if (zero - name == end - start && !memcmp(name, start, (size_t)(end - start))) return index;
        name = zero + 1;
    }
    return -1;
}

/* line [num_line]; names [num_names] ends each name with a zero, at most 64 names; values [num_line / 2 + 1];
   lists [names + 1, 3]; rest [num_line]. */
int64_t cut_integers(const uint8_t *line, int64_t num_line, const uint8_t *names, int64_t num_names, int32_t *values,
                     int64_t num_values, int64_t *lists, int64_t num_lists, uint8_t *rest, int64_t num_rest) {
    (void)num_values, (void)num_lists, (void)num_rest;
    const uint8_t *end = line + num_line, *at = after_space(line, end), *copied = line;
    uint8_t *out = rest;
    int64_t first = 0;
    uint64_t seen = 0;
    *lists = -1;
    if (at == end || *at != '{') return -1;
    do {
        at = after_space(at + 1, end);
        if (at == end || *at != '"') return -1;
        const uint8_t *key = at + 1;
        if (!(at = end_of_string(key, end)) || memchr(key, '\\', (size_t)(at - key))) return -1;
        int64_t name = index_of_name(key, at, names, num_names);
        at = after_space(at + 1, end);
        if (at == end || *at != ':') return -1;
        at = after_space(at + 1, end);
        if (at == end) return -1;
        if (name >= 0) {
            if (seen >> name & 1) return -1; /* of two equal keys the last one counts */
            seen |= (uint64_t)1 << name;
            const uint8_t *close = *at == '[' ? memchr(at, ']', (size_t)(end - at)) : NULL;
            int64_t num = close ? integers(at + 1, close, values + first) : -1;
            if (num >= 0) {
                memcpy(out, copied, (size_t)(at - copied));
                out += at - copied;
                *out++ = '0';
                copied = close + 1;
                lists[0] = name, lists[1] = first, lists[2] = first += num;
                lists += 3;
                *lists = -1;
                at = close + 1;
            }
        }
        if (!(at = end_of_value(at, end))) return -1;
    } while (*at == ',');
    memcpy(out, copied, (size_t)(end - copied));
    return out - rest + (end - copied);
}
