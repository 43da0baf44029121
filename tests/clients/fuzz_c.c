/* Puts broken files through the parsers of the client, for builds under sanitizers.
 *
 *   fuzz_c SECONDS FIRST CASES MANIFEST SEED...
 *
 * MANIFEST is the program.json that checkpoints are read for. Each SEED is a file whose ending names its parser: .json (a manifest),
 * .text (any JSON), .safetensors, .onnx, .npy. A case is a function of its number alone, which is printed when it fails: run that
 * one again with FIRST, and CASES of 1. Half of the files get the digest that belongs to them, so that what lies behind its check
 * is reached; of the others, none may be read that differs from its seed.
 */
#ifdef FUZZ_NPY
#define main train_main
#include "main.c"
#undef main
#include <stdbool.h>
#include <time.h>
#else
#include "burnish.c"
#endif

#include <signal.h>

#define MAX_SEEDS 64
#define HANG_SECONDS 10
#define CHECK(is_right, what)                                             \
    do {                                                                  \
        if (!(is_right)) {                                                \
            fprintf(stderr, "case %llu: %s\n", (unsigned long long)number, what); \
            abort();                                                      \
        }                                                                 \
    } while (0)

typedef struct bytes {
    char *data;
    size_t size;
} bytes;

static struct seed {
    const char *path;
    bytes content;
} seeds[MAX_SEEDS];
static size_t seed_count;
static uint64_t number, drawn;

static uint64_t draw(uint64_t below) {
    uint64_t z = drawn += 0x9e3779b97f4a7c15u; /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (z ^ z >> 31) % below;
}

static bytes read_seed(const char *path) {
    FILE *file = fopen(path, "rb");
    bytes content = {NULL, 0};
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) exit(fprintf(stderr, "%s cannot be read\n", path));
    content.size = (size_t)ftell(file);
    rewind(file);
    content.data = malloc(content.size + 1);
    if (content.data == NULL || fread(content.data, 1, content.size, file) != content.size) exit(2);
    content.data[content.size] = 0;
    fclose(file);
    return content;
}

/* Replace `removed` bytes from `at` on by others. */
static void splice(bytes *content, size_t at, size_t removed, const void *added, size_t count) {
    char *changed = malloc(content->size - removed + count + 1);
    if (changed == NULL) exit(2);
    memcpy(changed, content->data, at);
    memcpy(changed + at, added, count);
    memcpy(changed + at + count, content->data + at + removed, content->size - at - removed);
    content->size += count - removed;
    changed[content->size] = 0;
    free(content->data);
    content->data = changed;
}

static void mutate(bytes *content, const bytes *other) {
    static const char *const TOKENS[] = {"{", "}", "[", "]", ",", ":", "\"", "\\", "\\u0000", "\\ud800", "\\ud83d\\ude00", "null", "-1",
                                         "NaN", "1e999", "9223372036854775807", "18446744073709551616", "0", "\"base\":[]", "true",
                                         "\xf0\x9f\x98\x80", "\xc3", "\xed\xa0\x80", "[[[[[[[[", "\xff\xff\xff\xff\xff\xff\xff\xff",
                                         "\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", ")", "(", "'"};
    size_t at = (size_t)draw(content->size + 1), left = content->size - at, token, from, count;
    char byte = (char)draw(256);
    switch (draw(8)) {
        case 0:
        case 1:
            if (left > 0) content->data[at] = (char)(content->data[at] ^ 1 << draw(8));
            break;
        case 2:
            if (left > 0) content->data[at] = byte;
            break;
        case 3: splice(content, at, (size_t)draw(left < 40 ? left + 1 : 40), "", 0); break;
        case 4:
            token = (size_t)draw(sizeof TOKENS / sizeof *TOKENS);
            count = strlen(TOKENS[token]);
            splice(content, at, draw(2) && count <= left ? count : 0, TOKENS[token], count);
            break;
        case 5: /* a piece of another file, or of this one */
            from = (size_t)draw(other->size + 1);
            count = (size_t)draw(other->size - from < 60 ? other->size - from + 1 : 60);
            splice(content, at, draw(2) && count <= left ? count : 0, other->data + from, count);
            break;
        case 6: /* a digit, in place of one */
            from = at + strcspn(content->data + at, "0123456789");
            if (from < content->size && content->data[from] != 0) content->data[from] = (char)('0' + draw(10));
            break;
        default:
            if (draw(8) == 0) splice(content, at, left, "", 0);
    }
}

#ifdef FUZZ_NPY
static bool parse(const struct seed *seed, bytes content) {
    static FILE *file;
    burnish_tensor array = {0};
    (void)seed;
    if (file == NULL) file = tmpfile();
    rewind(file);
    if (ftruncate(fileno(file), 0) != 0 || fwrite(content.data, 1, content.size, file) != content.size) exit(2);
    fflush(file);
    rewind(file);
    bool is_read = read_npy_header(file, &array) && read_npy_data(file, &array);
    if (is_read) CHECK(array.shape[0] == 0 || sample_bytes(&array) <= content.size, "more bytes than the file has");
    free(array.data);
    return is_read;
}

static void stamp(bytes *content) { (void)content; }
static void prepare(const char *manifest) { (void)manifest; }
#else
static burnish_session *session;

static bool ends_with(const char *path, const char *ending) {
    return strlen(path) >= strlen(ending) && strcmp(path + strlen(path) - strlen(ending), ending) == 0;
}

static bool parse_manifest(burnish_session *opened, bytes content) {
    char *raw = malloc(content.size + 1);
    opened->manifest_text = malloc(content.size + 1);
    opened->folder = strdup("fuzzed");
    if (raw == NULL || opened->manifest_text == NULL || opened->folder == NULL) exit(2);
    memcpy(raw, content.data, content.size + 1);
    memcpy(opened->manifest_text, content.data, content.size + 1);
    burnish_status status = parse_json("program.json", opened->manifest_text, content.size, &opened->manifest);
    if (status == BURNISH_OK) status = check_manifest(opened, "program.json", raw, content.size);
    if (status == BURNISH_OK) status = read_signature(opened, "program.json");
    free(raw);
    return status == BURNISH_OK;
}

static bool parse_checkpoint(bytes content) {
    state_file file = {.path = "fuzzed.safetensors", .size = content.size};
    if (content.size == 0) return false;
    file.file = fmemopen(content.data, content.size, "rb");
    if (file.file == NULL) exit(2);
    burnish_status status = take_checkpoint(session, &file);
    close_state_file(&file);
    return status == BURNISH_OK;
}

static bool parse_model(bytes content) {
    exported export = {.session = session, .predict = &session->graphs[PREDICT]};
    span from = {(const uint8_t *)content.data, (const uint8_t *)content.data + content.size}, whole, field;
    burnish_status status = split_model(&export, "fuzzed.onnx", from);
    unsigned kind;
    buffer ordered = {0};
    while (from.at < from.end && read_field(&from, &kind, &whole, &field))
        if (kind == 7) order_updates(&session->graphs[STEP], field, &ordered);
    free(ordered.data);
    free(export.around.data);
    free(export.graph.data);
    return status == BURNISH_OK;
}

static bool parse(const struct seed *seed, bytes content) {
    bool is_read;
    json *values;
    if (ends_with(seed->path, ".safetensors")) return parse_checkpoint(content);
    if (ends_with(seed->path, ".onnx")) return parse_model(content);
    if (ends_with(seed->path, ".json")) {
        burnish_session *opened = calloc(1, sizeof *opened);
        if (opened == NULL) exit(2);
        is_read = parse_manifest(opened, content);
        burnish_close(opened);
        return is_read;
    }
    is_read = read_json(content.data, content.size, &values) == NULL;
    free(values);
    return is_read;
}

/* Give a file the digest that belongs to it, if it has the entry. */
static void stamp(bytes *content) {
    char text[DIGITS + 1], digest[sizeof DIGEST_PREFIX + DIGITS];
    sha256 hash;
    char *at = NULL;
    for (size_t i = 0; at == NULL && i + sizeof digest <= content->size; i++)
        if (memcmp(content->data + i, DIGEST_PREFIX, strlen(DIGEST_PREFIX)) == 0) at = content->data + i;
    if (at == NULL) return;
    memcpy(digest, at, sizeof digest - 1);
    digest[sizeof digest - 1] = 0;
    if (!clear_digest(at, sizeof digest, digest)) return;
    sha256_begin(&hash);
    sha256_add(&hash, content->data, content->size);
    sha256_text(&hash, text);
    memcpy(at + strlen(DIGEST_PREFIX), text, DIGITS);
}

/* Make the session that checkpoints are read into, without ONNX Runtime. */
static void prepare(const char *manifest) {
    bytes content = read_seed(manifest);
    session = calloc(1, sizeof *session);
    if (session == NULL || !parse_manifest(session, content)) exit(fprintf(stderr, "%s: %s\n", manifest, burnish_message()));
    for (size_t i = 0; i < session->state_count; i++)
        for (int set = 0; set < 2; set++) {
            state_entry *entry = &session->state[i];
            entry->data[set] = set == 1 && !entry->is_updated ? entry->data[0] : calloc(1, entry->bytes + 1);
        }
    free(content.data);
}
#endif

static void hang(int signal) {
    (void)signal;
    CHECK(false, "no end after " "10 s");
}

void __asan_on_error(void);
void __asan_on_error(void) { fprintf(stderr, "case %llu:\n", (unsigned long long)number); }

int main(int count, char **given) {
    uint64_t first, cases, accepted = 0;
    time_t began = time(NULL);
    if (count < 6) return 2;
    first = strtoull(given[2], NULL, 10);
    cases = strtoull(given[3], NULL, 10);
    prepare(given[4]);
    for (int i = 5; i < count && seed_count < MAX_SEEDS; i++) {
        seeds[seed_count++] = (struct seed){given[i], read_seed(given[i])};
        CHECK(parse(&seeds[seed_count - 1], seeds[seed_count - 1].content), given[i]);
    }
    signal(SIGALRM, hang);
    for (number = first; number < first + cases && time(NULL) - began < atol(given[1]); number++) {
        drawn = number * 0xd1342543de82ef95u;
        const struct seed *seed = &seeds[draw(seed_count)], *other = &seeds[draw(seed_count)];
        bytes content = {calloc(1, 1), 0};
        if (content.data == NULL) return 2;
        splice(&content, 0, 0, seed->content.data, seed->content.size);
        for (uint64_t i = 1 + draw(4); i > 0; i--) mutate(&content, &other->content);
        bool is_stamped = draw(2), is_same = content.size == seed->content.size && memcmp(content.data, seed->content.data, content.size) == 0;
        if (is_stamped) stamp(&content);
        alarm(HANG_SECONDS);
        bool is_read = parse(seed, content);
        alarm(0);
#ifndef FUZZ_NPY
        bool has_digest = ends_with(seed->path, ".json") || ends_with(seed->path, ".safetensors");
        CHECK(!(is_read && has_digest && !is_stamped && !is_same), "a file that has changed is read");
#endif
        (void)is_same;
        accepted += is_read;
        free(content.data);
    }
    printf("%llu cases, %llu read, %lld s\n", (unsigned long long)(number - first), (unsigned long long)accepted,
           (long long)(time(NULL) - began));
    return 0;
}
