/* Cut lists of numbers out of one line of JSON; treepack/files/input_files/number_lists.py explains the function.

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

#if defined(__GNUC__) && defined(__SIZEOF_INT128__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define HAS_WIDE_WORDS 1
#else
#define HAS_WIDE_WORDS 0
#endif

#if HAS_WIDE_WORDS
/* Returns 8 bytes with the digits among them as 0 to 9: "42,7.." -> 4 2 28 7 .., the first byte in the lowest bits. */
static uint64_t eight_bytes(const uint8_t *at) {
    uint64_t bytes;
    memcpy(&bytes, at, 8);
    return bytes ^ 0x3030303030303030u;
}

/* Returns the high bit of each byte above 9. A carry changes only bytes after the first of these. */
static uint64_t no_digits(uint64_t bytes) {
    return ((bytes + 0x7676767676767676u) | bytes) & 0x8080808080808080u;
}

/* Returns the number of the 8 digits in `bytes`. */
static uint64_t number_of_digits(uint64_t bytes) {
    bytes = bytes * 10 + (bytes >> 8); /* 0 0 0 0 0 0 4 2 -> bytes 0, 2, 4, 6 are the pairs 0 0 0 42 */
    uint64_t high = (bytes & 0x000000ff000000ffu) * 0x000f424000000064u; /* 100 + (1000000 << 32) */
    uint64_t low = ((bytes >> 16) & 0x000000ff000000ffu) * 0x0000271000000001u; /* 1 + (10000 << 32) */
    return (high + low) >> 32 & 0xffffffffu;
}

/* Reads "0,1,1,0," to 0 1 1 0; returns 0 if the 8 bytes are of another form. */
static int four_flags(const uint8_t *at, int32_t *values) {
    uint64_t bytes = eight_bytes(at) ^ 0x1c001c001c001c00u; /* "0," -> 0 0, "1," -> 1 0 */
    if (bytes & 0xfffefffefffefffeu) return 0;
    for (int i = 0; i < 4; i++) values[i] = (int32_t)(bytes >> 16 * i & 1);
    return 4;
}

/* Returns the number of digits at the start of 8 bytes and sets `value` to their number; 0 if there are none, or 8. */
static int short_number(const uint8_t *at, int32_t *value) {
    uint64_t bytes = eight_bytes(at), others = no_digits(bytes);
    if (!others) return 0;
    int num_digits = __builtin_ctzll(others) >> 3;
    if (num_digits == 0) return 0;
    *value = (int32_t)number_of_digits(bytes << (64 - 8 * num_digits)); /* 4 2 -> 0 0 0 0 0 0 4 2 */
    return num_digits;
}

/* 5^0 to 5^27, the powers below 2^64. */
#define MAX_PLACES 27
static const uint64_t POWERS_OF_5[MAX_PLACES + 1] = {
    1u, 5u, 25u, 125u, 625u, 3125u, 15625u, 78125u, 390625u, 1953125u, 9765625u, 48828125u, 244140625u, 1220703125u,
    6103515625u, 30517578125u, 152587890625u, 762939453125u, 3814697265625u, 19073486328125u, 95367431640625u,
    476837158203125u, 2384185791015625u, 11920928955078125u, 59604644775390625u, 298023223876953125u,
    1490116119384765625u, 7450580596923828125u};

/* Returns the double next to digits / 10^places, of two equally near ones the even one. */
static double decimal(uint64_t digits, int places) {
    if (digits == 0) return 0;
    uint64_t divisor = POWERS_OF_5[places];
    int shift = __builtin_clzll(digits), divisor_shift = __builtin_clzll(divisor);
    divisor <<= divisor_shift;
    /* Both are in [2^63, 2^64) now, so the quotient is in (2^62, 2^64): 63 or 64 bits, of which a double has 53. */
    unsigned __int128 dividend = (unsigned __int128)(digits << shift) << 63;
    uint64_t quotient = (uint64_t)(dividend / divisor);
    int is_inexact = (unsigned __int128)quotient * divisor != dividend;
    int num_dropped = quotient >> 63 ? 11 : 10;
    uint64_t mantissa = quotient >> num_dropped, half = (uint64_t)1 << (num_dropped - 1);
    uint64_t dropped = quotient & (2 * half - 1);
    mantissa += dropped > half || (dropped == half && (is_inexact || mantissa & 1));
    /* digits / 10^places = mantissa * 2^exponent, because 10^places = 5^places * 2^places */
    int exponent = divisor_shift - shift - places - 63 + num_dropped;
    /* The sum adds the highest bit of the mantissa, which a double does not store, to the biased exponent. */
    uint64_t bits = ((uint64_t)(exponent + 1074) << 52) + mantissa;
    double value;
    memcpy(&value, &bits, 8);
    return value;
}

/* Writes the numbers of the flat list between its brackets `at - 1` and `close` and returns how many there are; -1 if all
   are integers, or one is no number, has more than 19 digits or more than 27 places, or is far above 2^53. */
static int64_t floats(const uint8_t *at, const uint8_t *close, double *values) {
    int64_t num = 0;
    int has_float = 0;
    for (;;) {
        at = after_space(at, close);
        int is_negative = *at == '-', is_integer = 1;
        at += is_negative;
        const uint8_t *start = at;
        uint64_t digits = 0;
        while ((uint8_t)(*at - '0') <= 9 && at - start < 19) digits = digits * 10 + (uint64_t)(*at++ - '0');
        if (at == start || (*start == '0' && at - start > 1)) return -1;
        int64_t num_digits = digits ? at - start : 0, places = 0, exponent = 0;
        if (*at == '.') {
            const uint8_t *point = at++;
            while (digits == 0 && *at == '0') at++;
            for (; num_digits <= 11 && close - at >= 8; num_digits += 8, at += 8) {
                uint64_t bytes = eight_bytes(at);
                if (no_digits(bytes)) break;
                digits = digits * 100000000 + number_of_digits(bytes);
            }
            for (; num_digits < 19 && (uint8_t)(*at - '0') <= 9; num_digits++)
                digits = digits * 10 + (uint64_t)(*at++ - '0');
            places = at - point - 1;
            if (places == 0) return -1;
            is_integer = 0;
        }
        if (*at == 'e' || *at == 'E') {
            at++;
            int is_small = *at == '-';
            at += is_small || *at == '+';
            const uint8_t *first = at;
            while ((uint8_t)(*at - '0') <= 9 && at - first < 4) exponent = exponent * 10 + (*at++ - '0');
            if (at == first) return -1;
            places += is_small ? exponent : -exponent;
            is_integer = 0;
        }
        if (is_integer && ((is_negative && digits == 0) || digits >> 53)) return -1; /* -0, or not exact as a double */
        if (digits == 0) places = 0;
        if (places < 0 || places > MAX_PLACES) return -1;
        double value = decimal(digits, (int)places);
        values[num++] = is_negative ? -value : value;
        has_float |= !is_integer;
        at = after_space(at, close);
        if (at == close) return has_float ? num : -1;
        if (*at++ != ',') return -1;
    }
}
#else
static int64_t floats(const uint8_t *at, const uint8_t *close, double *values) {
    (void)at, (void)close, (void)values;
    return -1;
}
#endif

/* Writes the integers of the flat list between its brackets `at - 1` and `close`; returns their number, or -1 if one is
   no plain integer of 32 bits. Every loop ends at `close`, because a bracket is no part of a number. */
static int64_t integers(const uint8_t *at, const uint8_t *close, int32_t *values) {
    int64_t num = 0;
    for (;;) {
#if HAS_WIDE_WORDS
        at += *at == ' '; /* the only space that json.dumps writes */
        if (close - at >= 8) {
            if (four_flags(at, values + num)) { /* of a mask */
                num += 4;
                at += 8;
                continue;
            }
            int num_digits = short_number(at, &values[num]);
            if (num_digits && at[num_digits] == ',' && (*at != '0' || num_digits == 1)) {
                num++;
                at += num_digits + 1;
                continue;
            }
        }
#endif
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

/* line [num_line]; names [num_names] ends each name with a zero, at most 64 names; whole and real [num_line / 2 + 1];
   lists [names + 1, 4]; rest [num_line]. */
int64_t cut_numbers(const uint8_t *line, int64_t num_line, const uint8_t *names, int64_t num_names, int32_t *whole,
                    int64_t num_whole, double *real, int64_t num_real, int64_t *lists, int64_t num_lists,
                    uint8_t *rest, int64_t num_rest) {
    (void)num_whole, (void)num_real, (void)num_lists, (void)num_rest;
    const uint8_t *end = line + num_line, *at = after_space(line, end), *copied = line;
    uint8_t *out = rest;
    int64_t first[2] = {0, 0};
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
            int64_t num = close ? integers(at + 1, close, whole + first[0]) : -1;
            int is_real = close && num < 0;
            if (is_real) num = floats(at + 1, close, real + first[1]);
            if (num >= 0) {
                memcpy(out, copied, (size_t)(at - copied));
                out += at - copied;
                *out++ = '0';
                copied = close + 1;
                lists[0] = name, lists[1] = is_real, lists[2] = first[is_real], lists[3] = first[is_real] += num;
                lists += 4;
                *lists = -1;
                at = close + 1;
            }
        }
        if (!(at = end_of_value(at, end))) return -1;
    } while (*at == ',');
    memcpy(out, copied, (size_t)(end - copied));
    return out - rest + (end - copied);
}
