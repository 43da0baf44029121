/* See burnish.h. In the order of this file: messages, files, hashes, JSON, the signature, opening, running, cached features,
 * checkpoints, export.
 *
 * The state lies in two sets of buffers. A step reads one and writes the other, which are the inputs and outputs of ONNX Runtime
 * themselves; then the sets change roles, and no parameter is copied. Sizes that a file names are checked against the file, or
 * against what memory can hold, before memory is taken; of a program's folder only files of fixed names are opened.
 */
#undef _GNU_SOURCE /* strerror_r is POSIX's */
#define _POSIX_C_SOURCE 200809L
#include "burnish.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef BURNISH_ORT_HEADER
#include BURNISH_ORT_HEADER
#else
#include "burnish_ort.h"
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "burnish.c is for little-endian machines, the byte order of its files"
#endif
#ifndef BURNISH_ONE_FILE_LIMIT
#define BURNISH_ONE_FILE_LIMIT ((size_t)1 << 30) /* bytes of weights from which an export keeps them in a file beside it */
#endif
#define BURNISH_CACHE_LIMIT ((size_t)256 << 20) /* bytes of features, where burnish_cache_open is given no limit */
#define FORMAT_VERSION 3
#define FORMAT_TEXT "3"
#define MAX_JSON_BYTES ((size_t)64 << 20)
#define MAX_JSON_VALUES ((size_t)2 << 20)
#define MAX_DEPTH 32
#define MAX_THREADS 1024 /* each graph has a pool of its own, and ONNX Runtime makes as many as it is told */
#define MAX_PATH 4096
#define BLOCK 65536
#define NONE SIZE_MAX

static _Thread_local char last_message[2048];

const char *burnish_message(void) { return last_message; }

static size_t utf8_length(const char *from);

/* Add what is UTF-8 to a message, and '?' for every other byte: names of files, and text that was cut, need not be. */
static char *add_message(char *to, const char *from, size_t count) {
    for (const char *end = from + count; from < end;) {
        size_t length = utf8_length(from);
        if (length == 0 || length > (size_t)(end - from)) {
            *to++ = '?';
            from++;
        }
        while (length > 0 && length <= (size_t)(end - from) && length-- > 0) *to++ = *from++;
    }
    *to = 0;
    return to;
}

/* Whether a byte of UTF-8 is another one than the first of a character. */
static bool is_within(char byte) { return ((unsigned char)byte & 0xc0) == 0x80; }

/* Keep a message; of one that is too long its beginning and its end, where the reason and the remedy stand. */
static burnish_status fail(burnish_status status, const char *format, ...) {
    size_t room = sizeof last_message - 8;
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    int measured = vsnprintf(NULL, 0, format, arguments);
    size_t length = measured < 0 ? 0 : (size_t)measured;
    char *text = malloc(length + 1);
    if (text == NULL) {
        vsnprintf(last_message, sizeof last_message, format, again);
    } else {
        vsnprintf(text, length + 1, format, again);
        size_t end = length, begin = length;
        if (length > room) {
            for (end = room / 2; end > 0 && is_within(text[end]);) end--;
            for (begin = length - room / 2; is_within(text[begin]);) begin++;
        }
        char *to = add_message(last_message, text, end);
        if (length > room) add_message(add_message(to, " ... ", 5), text + begin, length - begin);
        free(text);
    }
    va_end(arguments);
    va_end(again);
    return status;
}

/* The reason of the system for an error number, in `text`. */
static const char *reason_of(int error, char text[128]) {
    if (strerror_r(error, text, 128) != 0) snprintf(text, 128, "error %d", error);
    return text;
}

#define TRY(call)                                  \
    do {                                           \
        burnish_status status_ = (call);           \
        if (status_ != BURNISH_OK) return status_; \
    } while (0)

static burnish_status no_memory(const char *what, size_t bytes) {
    return fail(BURNISH_ENGINE_ERROR, "There is no memory for %s (%zu bytes): free some, or take a smaller program or batch",
                what, bytes);
}

static burnish_status damaged(const char *path, const char *what) {
    return fail(BURNISH_CHECKPOINT_ERROR, "'%s' is damaged: %s. Save it again, or use another copy", path, what);
}

static burnish_status damaged_entry(const char *path, const char *entry, const char *what) {
    return fail(BURNISH_CHECKPOINT_ERROR, "'%s' is damaged: '%s' %s. Save it again, or use another copy", path, entry, what);
}

static burnish_status is_null(const char *what, const char *remedy) {
    return fail(BURNISH_CONFIGURATION_ERROR, "%s is NULL: %s", what, remedy);
}

static burnish_status check_session(const burnish_session *session) {
    return session != NULL ? BURNISH_OK : is_null("The session", "give one that burnish_open made; its status says why it made none");
}

static burnish_status check_path(const char *path) {
    return path != NULL ? BURNISH_OK : is_null("The path", "give that of a file");
}

static burnish_status join_path(char *path, const char *folder, const char *name, const char *ending) {
    int length = snprintf(path, MAX_PATH, "%s/%s%s", folder, name, ending);
    if (length < 0 || length >= MAX_PATH) return fail(BURNISH_CONFIGURATION_ERROR, "The path of '%s' is too long", name);
    return BURNISH_OK;
}

/* Open a file to read it; *file is NULL where that fails. */
static burnish_status open_file(const char *path, FILE **file, uint64_t *size) {
    struct stat status;
    char reason[128];
    *file = NULL;
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe without a writer would be waited for */
    if (descriptor < 0)
        return fail(BURNISH_CHECKPOINT_ERROR, "'%s' cannot be opened: %s. Check the path", path, reason_of(errno, reason));
    if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
        close(descriptor);
        return fail(BURNISH_CHECKPOINT_ERROR, "'%s' is not a file: give the path of one", path);
    }
    *file = fdopen(descriptor, "rb");
    if (*file == NULL) {
        close(descriptor);
        return no_memory(path, BUFSIZ);
    }
    *size = (uint64_t)status.st_size;
    return BURNISH_OK;
}

/* Read a whole file of at most `limit` bytes, with a zero behind them; the caller frees it. */
static burnish_status read_file(const char *path, size_t limit, char **content, size_t *size) {
    FILE *file;
    uint64_t bytes;
    TRY(open_file(path, &file, &bytes));
    *content = NULL;
    if (bytes > limit) {
        fclose(file);
        return damaged(path, "it is larger than any file of its kind");
    }
    *content = malloc((size_t)bytes + 1);
    if (*content != NULL) *size = fread(*content, 1, (size_t)bytes, file);
    fclose(file);
    if (*content == NULL) return no_memory(path, (size_t)bytes);
    (*content)[*size] = 0;
    if (*size == bytes) return BURNISH_OK;
    free(*content);
    return damaged(path, "it ends too early");
}

static bool is_hex(const char *text, size_t count) { return strspn(text, "0123456789abcdef") >= count; }

/* Split a path into its folder and name. */
static burnish_status split_path(const char *path, char *folder, const char **name) {
    const char *slash = strrchr(path, '/');
    *name = slash == NULL ? path : slash + 1;
    if (**name == 0 || strlen(path) + 64 > MAX_PATH)
        return fail(BURNISH_CONFIGURATION_ERROR, "'%s' is not a path of a file", path);
    size_t length = slash == NULL ? 1 : slash == path ? 1 : (size_t)(slash - path);
    memcpy(folder, slash == NULL ? "." : path, length);
    folder[length] = 0;
    return BURNISH_OK;
}

/* Remove <before><name><between><hexadecimal digits><after> beside a file: what killed processes, or earlier exports, left. A
 * process that is alive has a lock on its own. */
static void remove_beside(const char *path, const char *before, const char *between, size_t digits, const char *after,
                          const char *keep) {
    char folder[MAX_PATH], other[MAX_PATH], found[MAX_PATH];
    const char *name;
    if (split_path(path, folder, &name) != BURNISH_OK) return;
    int begin = snprintf(other, sizeof other, "%s%s%s", before, name, between);
    DIR *entries = opendir(folder);
    for (struct dirent *entry = NULL; entries != NULL && (entry = readdir(entries)) != NULL;) {
        if (strncmp(entry->d_name, other, (size_t)begin) != 0 || strcmp(entry->d_name, keep) == 0) continue;
        const char *rest = entry->d_name + begin;
        if (!is_hex(rest, digits) || strcmp(rest + digits, after) != 0) continue;
        if (join_path(found, folder, entry->d_name, "") != BURNISH_OK) continue;
        int descriptor = open(found, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (descriptor < 0) continue;
        if (flock(descriptor, LOCK_EX | LOCK_NB) == 0) unlink(found);
        close(descriptor);
    }
    if (entries != NULL) closedir(entries);
}

/* A file that is written whole or not at all: under another name, flushed to the disk, then renamed. */
typedef struct new_file {
    char partial[MAX_PATH];
    FILE *file;
    int error; /* the first, as errno has it */
} new_file;

static burnish_status not_written(const char *path, int error) {
    char reason[128];
    return fail(
        BURNISH_CHECKPOINT_ERROR,
        "'%s' could not be written: %s. An earlier file there is untouched. Free space on the disk, or choose a folder you can "
        "write to",
        path, reason_of(error, reason));
}

/* Make a file under a name that no other process or thread has, locked until it is closed. */
static int make_partial(new_file *new, const char *path, const char *name, uint32_t distinct) {
    struct stat status;
    snprintf(new->partial, MAX_PATH, "%.*s.%s.%08x.partial", (int)(name - path), path, name, (unsigned)distinct);
    int descriptor = open(new->partial, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor < 0) return -1;
    (void)flock(descriptor, LOCK_EX); /* where the file system has no locks, nobody can take it for a dead one's either */
    if (fstat(descriptor, &status) == 0 && status.st_nlink > 0) return descriptor;
    close(descriptor);
    errno = EEXIST; /* it was cleaned up before it was locked: another name */
    return -1;
}

static burnish_status begin_file(new_file *new, const char *path) {
    char folder[MAX_PATH];
    const char *name;
    struct timespec now;
    struct stat status;
    int descriptor = -1;
    TRY(split_path(path, folder, &name));
    if (stat(path, &status) == 0 && !S_ISREG(status.st_mode)) /* an administrator could replace a device by a file */
        return fail(BURNISH_CHECKPOINT_ERROR, "'%s' is a folder, a device or a pipe: give the name of a file", path);
    for (uint32_t attempt = 0; descriptor < 0 && attempt < 100 && (attempt == 0 || errno == EEXIST); attempt++) {
        clock_gettime(CLOCK_REALTIME, &now);
        descriptor = make_partial(
            new, path, name,
            ((uint32_t)now.tv_nsec + (uint32_t)now.tv_sec) * 2654435761u ^ (uint32_t)getpid() << 8 ^ (uint32_t)(uintptr_t)new);
    }
    new->error = 0;
    new->file = descriptor < 0 ? NULL : fdopen(descriptor, "wb");
    if (new->file != NULL) return BURNISH_OK;
    int error = errno;
    if (descriptor >= 0) {
        unlink(new->partial);
        close(descriptor);
    }
    return not_written(path, error);
}

static void put(new_file *new, const void *bytes, size_t count) {
    if (new->error == 0 && count > 0 && fwrite(bytes, 1, count, new->file) != count) new->error = errno == 0 ? EIO : errno;
}

/* Put a file in its place, and leave it open, which keeps its lock; `status` is how the writing went. */
static burnish_status place_file(new_file *new, const char *path, burnish_status status) {
    char folder[MAX_PATH];
    const char *name;
    if (new->error == 0 && status == BURNISH_OK &&
        (fflush(new->file) != 0 || fsync(fileno(new->file)) != 0 || rename(new->partial, path) != 0))
        new->error = errno;
    if (status != BURNISH_OK || new->error != 0) {
        unlink(new->partial);
        fclose(new->file);
        return status != BURNISH_OK ? status : not_written(path, new->error);
    }
    TRY(split_path(path, folder, &name));
    int descriptor = open(folder, O_RDONLY | O_CLOEXEC);
    if (descriptor >= 0) {
        fsync(descriptor); /* the file is in its place, whether this is refused or not */
        close(descriptor);
    }
    remove_beside(path, ".", ".", 8, ".partial", "");
    return BURNISH_OK;
}

static burnish_status end_file(new_file *new, const char *path, burnish_status status) {
    status = place_file(new, path, status);
    if (status == BURNISH_OK) fclose(new->file);
    return status;
}

/* SHA-256 (FIPS 180-4), of a program's files. */

typedef struct sha256 {
    uint32_t state[8];
    uint64_t bytes;
    uint8_t block[64];
} sha256;

static const uint32_t SHA256_CONSTANTS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotated(uint32_t value, int by) { return value >> by | value << (32 - by); }

static void sha256_begin(sha256 *hash) {
    *hash = (sha256){.state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
}

static void sha256_block(sha256 *hash, const uint8_t *block) {
    uint32_t words[64], v[8];
    for (int i = 0; i < 16; i++)
        words[i] =
            (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 | (uint32_t)block[4 * i + 2] << 8 | block[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t a = words[i - 15], b = words[i - 2];
        words[i] = words[i - 16] + (rotated(a, 7) ^ rotated(a, 18) ^ a >> 3) + words[i - 7] +
                   (rotated(b, 17) ^ rotated(b, 19) ^ b >> 10);
    }
    memcpy(v, hash->state, sizeof v);
    for (int i = 0; i < 64; i += 8)
        for (int j = 0; j < 8; j++) { /* the eight variables change places with each round; unrolled, none is moved */
            uint32_t a = v[(8 - j) & 7], b = v[(9 - j) & 7], c = v[(10 - j) & 7], e = v[(12 - j) & 7], f = v[(13 - j) & 7],
                     g = v[(14 - j) & 7], *d = &v[(11 - j) & 7], *h = &v[(15 - j) & 7];
            uint32_t one = *h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + ((e & f) ^ (~e & g)) +
                           SHA256_CONSTANTS[i + j] + words[i + j];
            *d += one;
            *h = one + (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        }
    for (int i = 0; i < 8; i++) hash->state[i] += v[i];
}

static void sha256_add(sha256 *hash, const void *bytes, size_t count) {
    for (const uint8_t *from = bytes; count > 0;) {
        size_t held = hash->bytes % 64, taken = count < 64 - held ? count : 64 - held;
        memcpy(hash->block + held, from, taken);
        hash->bytes += taken;
        from += taken;
        count -= taken;
        if (held + taken == 64) sha256_block(hash, hash->block);
    }
}

static void sha256_text(sha256 *hash, char text[65]) {
    uint64_t bits = hash->bytes * 8;
    uint8_t length[8];
    for (int i = 0; i < 8; i++) length[i] = (uint8_t)(bits >> (56 - 8 * i));
    sha256_add(hash, "\x80", 1);
    while (hash->bytes % 64 != 56) sha256_add(hash, "", 1);
    sha256_add(hash, length, 8);
    for (int i = 0; i < 8; i++) snprintf(text + 8 * i, 9, "%08x", (unsigned)hash->state[i]);
}

/* The digest of a file, which stands in it: "sha256:" and the SHA-256 of the file's bytes with zeros for the digits. */
#define DIGEST_KEY "burnish.digest"
#define DIGEST_PREFIX "sha256:"
#define DIGITS 64

static const char ZEROS[] = "0000000000000000000000000000000000000000000000000000000000000000";

/* Find the digits of a digest in a text, and write zeros over them; false where it is no digest, or not there. */
static bool clear_digest(char *text, size_t size, const char *digest) {
    size_t prefix = strlen(DIGEST_PREFIX), length = prefix + DIGITS;
    if (digest == NULL || strlen(digest) != length || memcmp(digest, DIGEST_PREFIX, prefix) != 0 || !is_hex(digest + prefix, DIGITS))
        return false;
    for (char *at = text; (size_t)(text + size - at) >= length; at++) {
        at = memchr(at, *digest, (size_t)(text + size - at) - length + 1);
        if (at == NULL) return false;
        if (memcmp(at, digest, length) != 0) continue;
        memcpy(at + prefix, ZEROS, DIGITS);
        return true;
    }
    return false;
}

static burnish_status has_changed(const char *path) { return damaged(path, "it has changed since it was written"); }

/* Whether a hash that was made of a file is the one that its digest, which was found there, names. */
static burnish_status check_digest(const char *path, sha256 *hash, const char *digest) {
    char text[65];
    sha256_text(hash, text);
    return strcmp(text, digest + strlen(DIGEST_PREFIX)) == 0 ? BURNISH_OK : has_changed(path);
}

/* A strict reader of JSON. Text is decoded in place; the values lie in one array, which is as long as the text needs. */

typedef enum json_kind { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } json_kind;

typedef struct json {
    json_kind kind;
    bool is_whole; /* a number that int64 holds exactly */
    int64_t whole; /* also of a bool */
    double number;
    const char *key, *text;
    struct json *child, *next;
} json;

typedef struct json_reader {
    char *at;
    json *values;
    size_t used;
    int depth;
    const char *fault; /* that is none of grammar */
} json_reader;

static void skip_space(json_reader *reader) { reader->at += strspn(reader->at, " \t\r\n"); }

static bool read_hex(const char *from, unsigned *code) {
    if (strspn(from, "0123456789abcdefABCDEF") < 4) return false;
    char digits[5] = {from[0], from[1], from[2], from[3], 0};
    *code = (unsigned)strtoul(digits, NULL, 16);
    return true;
}

static char *put_utf8(char *to, unsigned code) {
    if (code < 0x80) {
        *to++ = (char)code;
        return to;
    }
    int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    *to++ = (char)((0xff00u >> (more + 1) & 0xffu) | code >> 6 * more);
    while (more-- > 0) *to++ = (char)(0x80 | (code >> 6 * more & 0x3f));
    return to;
}

/* How many bytes the character of UTF-8 (RFC 3629) takes that begins here; 0 where none does. */
static size_t utf8_length(const char *from) {
    const unsigned char *at = (const unsigned char *)from;
    size_t length = at[0] < 0x80 ? 1 : at[0] < 0xc2 ? 0 : at[0] < 0xe0 ? 2 : at[0] < 0xf0 ? 3 : at[0] < 0xf5 ? 4 : 0;
    for (size_t i = 1; i < length; i++)
        if ((at[i] & 0xc0) != 0x80) return 0;
    bool is_overlong = (at[0] == 0xe0 && at[1] < 0xa0) || (at[0] == 0xf0 && at[1] < 0x90);
    bool is_no_character = (at[0] == 0xed && at[1] >= 0xa0) || (at[0] == 0xf4 && at[1] >= 0x90);
    return is_overlong || is_no_character ? 0 : length;
}

static bool read_json_string(json_reader *reader, const char **text) {
    char *from = reader->at + 1, *to = from;
    *text = to;
    while (*from != '"') {
        if ((unsigned char)*from < 0x20) return false;
        if (*from != '\\') {
            size_t length = utf8_length(from);
            if (length == 0) return false;
            while (length-- > 0) *to++ = *from++;
            continue;
        }
        const char *plain = "\"\\/bfnrt", *meaning = "\"\\/\b\f\n\r\t", *found = from[1] == 0 ? NULL : strchr(plain, from[1]);
        unsigned code, low;
        if (found != NULL) {
            *to++ = meaning[found - plain];
            from += 2;
        } else {
            if (from[1] != 'u' || !read_hex(from + 2, &code)) return false;
            if (code == 0) reader->fault = "holds the character U+0000, which ends a text in C";
            from += 6;
            if (code >= 0xd800 && code < 0xe000) {
                bool is_pair = code < 0xdc00 && from[0] == '\\' && from[1] == 'u' && read_hex(from + 2, &low) &&
                               low >= 0xdc00 && low < 0xe000;
                if (!is_pair) {
                    reader->fault = "holds half of a surrogate pair, which is no character";
                    return false;
                }
                code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
                from += 6;
            }
            if (reader->fault != NULL) return false;
            to = put_utf8(to, code);
        }
    }
    reader->at = from + 1;
    *to = 0;
    return true;
}

/* strtod, which reads by the locale of the process. */
static double read_decimal(const char *digits, char **end) {
    char localized[128], half[32];
    const char *point = strchr(digits, '.');
    if (point == NULL) return strtod(digits, end);
    snprintf(half, sizeof half, "%.1f", 0.5); /* localeconv is not for several threads */
    snprintf(localized, sizeof localized, "%.*s%.*s%s", (int)(point - digits), digits, (int)strlen(half) - 2, half + 1, point + 1);
    double number = strtod(localized, end);
    *end = (char *)digits + (**end == 0 ? strlen(digits) : 0);
    return number;
}

static bool read_json_number(json_reader *reader, json *value) {
    char digits[64], *end, *start = reader->at, *at = start + (*start == '-');
    size_t integer = strspn(at, "0123456789");
    if (integer == 0 || (integer > 1 && *at == '0')) return false;
    at += integer;
    value->is_whole = true;
    if (*at == '.') {
        size_t fraction = strspn(at + 1, "0123456789");
        if (fraction == 0) return false;
        at += 1 + fraction;
        value->is_whole = false;
    }
    if (*at == 'e' || *at == 'E') {
        at += 1 + (at[1] == '+' || at[1] == '-');
        size_t exponent = strspn(at, "0123456789");
        if (exponent == 0) return false;
        at += exponent;
        value->is_whole = false;
    }
    size_t length = (size_t)(at - start);
    if (length >= sizeof digits) return false;
    memcpy(digits, start, length);
    digits[length] = 0;
    errno = 0;
    if (value->is_whole) {
        value->whole = strtoll(digits, NULL, 10);
        if (errno == ERANGE) value->is_whole = false;
    }
    value->number = read_decimal(digits, &end);
    value->kind = JSON_NUMBER;
    reader->at = at;
    return *end == 0 && isfinite(value->number);
}

static int by_text(const void *one, const void *other) { return strcmp(*(char *const *)one, *(char *const *)other); }

/* Whether no key of an object comes twice: of two, other readers take the other. */
static bool has_distinct_keys(json_reader *reader, const json *object, size_t count) {
    if (count < 2) return true;
    const char **keys = malloc(count * sizeof *keys);
    size_t i = 0;
    if (keys == NULL) reader->fault = "has more keys in its JSON than there is memory for";
    for (const json *child = object->child; keys != NULL && child != NULL; child = child->next) keys[i++] = child->key;
    if (keys != NULL) qsort(keys, count, sizeof *keys, by_text);
    for (i = 1; keys != NULL && i < count; i++)
        if (strcmp(keys[i - 1], keys[i]) == 0) reader->fault = "has a key twice in an object";
    free(keys);
    return reader->fault == NULL;
}

static bool read_json_value(json_reader *reader, json **result, const char *key);

static bool read_json_list(json_reader *reader, json *value, char closing) {
    json **end = &value->child;
    size_t count = 0;
    value->kind = closing == '}' ? JSON_OBJECT : JSON_ARRAY;
    if (++reader->depth > MAX_DEPTH) return false;
    reader->at++;
    skip_space(reader);
    while (*reader->at != closing) {
        const char *key = NULL;
        if (value->child != NULL) {
            if (*reader->at++ != ',') return false;
            skip_space(reader);
        }
        if (closing == '}') {
            if (*reader->at != '"' || !read_json_string(reader, &key)) return false;
            skip_space(reader);
            if (*reader->at++ != ':') return false;
        }
        if (!read_json_value(reader, end, key)) return false;
        end = &(*end)->next;
        count++;
        skip_space(reader);
    }
    reader->at++;
    reader->depth--;
    return closing == ']' || has_distinct_keys(reader, value, count);
}

static bool read_json_value(json_reader *reader, json **result, const char *key) {
    static const struct {
        const char *word;
        json_kind kind;
        int64_t whole;
    } WORDS[] = {{"null", JSON_NULL, 0}, {"false", JSON_BOOL, 0}, {"true", JSON_BOOL, 1}};
    json *value = *result = &reader->values[reader->used++];
    value->key = key;
    skip_space(reader);
    switch (*reader->at) {
        case '{': return read_json_list(reader, value, '}');
        case '[': return read_json_list(reader, value, ']');
        case '"': value->kind = JSON_STRING; return read_json_string(reader, &value->text);
    }
    for (size_t i = 0; i < 3; i++)
        if (strncmp(reader->at, WORDS[i].word, strlen(WORDS[i].word)) == 0) {
            value->kind = WORDS[i].kind;
            value->whole = WORDS[i].whole;
            reader->at += strlen(WORDS[i].word);
            return true;
        }
    return read_json_number(reader, value);
}

/* How many values a text has at most. */
static size_t count_json(const char *text, size_t size) {
    size_t most = 1;
    for (size_t i = 0; i < size; i++) most += text[i] == ',' || text[i] == '[' || text[i] == '{';
    return most;
}

/* Read a text of `size` bytes that ends with a zero. The caller frees *values, of which the first is the root; NULL and a fault
 * where it cannot be read. */
static const char *read_json(char *text, size_t size, json **values) {
    size_t most = count_json(text, size);
    *values = NULL;
    if (most > MAX_JSON_VALUES) return "has more values in its JSON than any program needs";
    *values = calloc(most, sizeof(json));
    if (*values == NULL) return "has more values in its JSON than there is memory for";
    json_reader reader = {.at = text, .values = *values, .fault = NULL};
    json *root;
    bool is_read = read_json_value(&reader, &root, NULL);
    if (is_read) skip_space(&reader);
    if (is_read && reader.at == text + size) return NULL;
    free(*values);
    *values = NULL;
    return reader.fault != NULL ? reader.fault : "is not JSON, or is nested too deeply";
}

static burnish_status parse_json(const char *path, char *text, size_t size, json **values) {
    char what[128];
    const char *fault = read_json(text, size, values);
    if (fault == NULL) return BURNISH_OK;
    snprintf(what, sizeof what, "it %s", fault);
    return damaged(path, what);
}

static const json *member(const json *object, const char *key, json_kind kind) {
    for (const json *child = object != NULL && object->kind == JSON_OBJECT ? object->child : NULL; child != NULL;
         child = child->next)
        if (strcmp(child->key, key) == 0) return child->kind == kind ? child : NULL;
    return NULL;
}

static const char *text_of(const json *object, const char *key) {
    const json *found = member(object, key, JSON_STRING);
    return found == NULL ? NULL : found->text;
}

static bool whole_of(const json *object, const char *key, int64_t *whole) {
    const json *found = member(object, key, JSON_NUMBER);
    if (found == NULL || !found->is_whole) return false;
    *whole = found->whole;
    return true;
}

/* What ONNX, numpy (in messages) and safetensors call an element type. */
static const struct dtype_names {
    burnish_dtype dtype;
    size_t size;
    const char *onnx, *plain, *safetensors;
} DTYPES[] = {{BURNISH_FLOAT, 4, "FLOAT", "float32", "F32"},
              {BURNISH_UINT8, 1, "UINT8", "uint8", "U8"},
              {BURNISH_INT8, 1, "INT8", "int8", "I8"},
              {BURNISH_UINT16, 2, "UINT16", "uint16", "U16"},
              {BURNISH_INT16, 2, "INT16", "int16", "I16"},
              {BURNISH_INT32, 4, "INT32", "int32", "I32"},
              {BURNISH_INT64, 8, "INT64", "int64", "I64"},
              {BURNISH_BOOL, 1, "BOOL", "bool", "BOOL"},
              {BURNISH_FLOAT16, 2, "FLOAT16", "float16", "F16"},
              {BURNISH_DOUBLE, 8, "DOUBLE", "float64", "F64"},
              {BURNISH_UINT32, 4, "UINT32", "uint32", "U32"},
              {BURNISH_UINT64, 8, "UINT64", "uint64", "U64"},
              {BURNISH_BFLOAT16, 2, "BFLOAT16", "bfloat16", "BF16"}};

static const struct dtype_names *names_of(int dtype) {
    for (size_t i = 0; i < sizeof DTYPES / sizeof *DTYPES; i++)
        if ((int)DTYPES[i].dtype == dtype) return &DTYPES[i];
    return NULL;
}

/* The bytes of an array of known extents; false where they do not fit a size_t. */
static bool size_of(size_t element, size_t rank, const int64_t *shape, size_t *bytes) {
    *bytes = element;
    for (size_t i = 0; i < rank; i++) {
        if (shape[i] < 0 || (shape[i] > 0 && *bytes > (size_t)PTRDIFF_MAX / (size_t)shape[i])) return false;
        *bytes *= (size_t)shape[i];
    }
    return true;
}

typedef struct entry {
    const char *name, *role, *updates;
    const struct dtype_names *type; /* NULL: text, or another type that no state has */
    size_t rank;                    /* NONE: an output of unknown rank */
    int64_t shape[BURNISH_MAX_RANK];
    const char *symbols[BURNISH_MAX_RANK]; /* the name of a symbolic dimension; its extent in `shape` is then -1 */
    bool has_default, has_minimum, has_maximum, has_ignored;
    bool two_values; /* the minimum and the maximum alone are valid: a label that is a sign */
    double default_value;
    int64_t minimum, maximum, ignored;
    int64_t sample_axis; /* of a batch or an output of the model, where the samples stand; -1: it has none */
    size_t state; /* the number of the state entry that an input reads, or that an output is the next value of; NONE */
} entry;

typedef struct graph {
    const char *name;
    entry *inputs, *outputs;
    size_t input_count, output_count;
    const json *extents; /* what batch normalization asks of the batch */
    int64_t end;         /* steps of the schedule; -1 without end */
    OrtSession *session; /* opened when it is first run */
    const char **input_names, **output_names;
    OrtValue **input_values, **output_values;
    double *scalars; /* room for one number per input: hyperparameters, the seed */
} graph;

typedef struct state_entry {
    const entry *kind;
    size_t bytes;
    bool is_updated, is_base; /* the base is what adapters stand next to: their checkpoints have its hash alone */
    void *data[2]; /* the same twice for one that no step updates */
    OrtValue *values[2];
} state_entry;

enum { INIT, STEP, EVALUATE, PREDICT, FEATURES, GRAPHS }; /* FEATURES is there where a frozen backbone's are cached */
static const char *const GRAPH_NAMES[GRAPHS] = {"init", "step", "evaluate", "predict", "features"};

/* Entries for an exported model's metadata_props, as a checkpoint has them: a JSON object of texts. */
typedef struct metadata {
    char *text, *read; /* as it was, and as its values refer to it */
    json *values;
} metadata;

struct burnish_session {
    char *folder, *models, *manifest_text, *extra;
    metadata metadata;
    json *manifest;
    burnish_options options;
    const OrtApi *ort;
    OrtEnv *env;
    OrtMemoryInfo *memory;
    graph graphs[GRAPHS];
    state_entry *state;
    size_t state_count, base_count;
    char base_hash[DIGITS + 1]; /* "" where it is not known */
    int current;
    graph *last; /* whose outputs are held */
    burnish_tensor *tensors;
};

static void free_metadata(metadata *metadata) {
    free(metadata->text);
    free(metadata->read);
    free(metadata->values);
}

/* Read the metadata of a checkpoint; none are there where `text` is NULL. */
static burnish_status read_metadata(const char *path, const char *text, metadata *metadata) {
    if (text == NULL) return BURNISH_OK;
    metadata->text = strdup(text);
    metadata->read = strdup(text);
    if (metadata->text == NULL || metadata->read == NULL) return no_memory("the checkpoint's metadata", strlen(text));
    const char *fault = read_json(metadata->read, strlen(text), &metadata->values);
    if (fault != NULL) return damaged_entry(path, "metadata", fault);
    bool are_texts = metadata->values->kind == JSON_OBJECT;
    for (const json *item = metadata->values->child; are_texts && item != NULL; item = item->next)
        are_texts = item->kind == JSON_STRING;
    return are_texts ? BURNISH_OK : damaged_entry(path, "metadata", "is no JSON object of texts");
}

static bool is(const char *text, const char *other) { return text != NULL && strcmp(text, other) == 0; }

static bool is_state(const entry *entry) {
    static const char *const ROLES[] = {"parameter", "statistic", "optimizer", "key", "step"};
    for (size_t i = 0; i < 5; i++)
        if (is(entry->role, ROLES[i])) return true;
    return false;
}

/* The axis of the samples, which is the first where it is left out. */
static bool read_sample_axis(const json *from, entry *to) {
    const json *axis = from->child;
    while (axis != NULL && strcmp(axis->key, "sample_axis") != 0) axis = axis->next;
    if (axis == NULL) return true;
    to->sample_axis = axis->kind == JSON_NULL ? -1 : axis->whole;
    if (axis->kind == JSON_NULL) return true;
    if (axis->kind != JSON_NUMBER || !axis->is_whole || axis->whole < 0) return false;
    return axis->whole == 0 || (to->rank != NONE && (size_t)axis->whole < to->rank);
}

static bool read_entry(const json *from, entry *to) {
    const json *shape = member(from, "shape", JSON_ARRAY), *value = member(from, "default", JSON_NUMBER);
    const char *dtype = text_of(from, "dtype");
    to->name = text_of(from, "name");
    to->role = text_of(from, "role");
    to->updates = text_of(from, "updates");
    to->state = to->rank = NONE;
    if (to->name == NULL || to->role == NULL || dtype == NULL) return false;
    for (size_t i = 0; i < sizeof DTYPES / sizeof *DTYPES; i++)
        if (strcmp(DTYPES[i].onnx, dtype) == 0) to->type = &DTYPES[i];
    if (shape != NULL) {
        to->rank = 0;
        for (const json *extent = shape->child; extent != NULL; extent = extent->next, to->rank++) {
            if (to->rank == BURNISH_MAX_RANK) return false;
            to->shape[to->rank] = -1;
            if (extent->kind == JSON_STRING)
                to->symbols[to->rank] = extent->text;
            else if (extent->kind == JSON_NUMBER && extent->is_whole && extent->whole >= 0)
                to->shape[to->rank] = extent->whole;
            else if (extent->kind != JSON_NULL)
                return false;
        }
    }
    to->has_default = value != NULL || is(text_of(from, "default"), "NaN");
    to->default_value = value == NULL ? NAN : value->number;
    to->has_minimum = whole_of(from, "minimum", &to->minimum);
    to->has_maximum = whole_of(from, "maximum", &to->maximum);
    to->has_ignored = whole_of(from, "ignored", &to->ignored);
    const json *two_values = member(from, "two_values", JSON_BOOL);
    to->two_values = two_values != NULL && two_values->whole != 0 && to->has_minimum && to->has_maximum;
    return read_sample_axis(from, to);
}

static bool read_entries(const json *list, entry **entries, size_t *count) {
    if (list == NULL) return false;
    for (const json *item = list->child; item != NULL; item = item->next) ++*count;
    *entries = calloc(*count + 1, sizeof(entry));
    size_t number = 0;
    for (const json *item = list->child; *entries != NULL && item != NULL; item = item->next, number++)
        if (!read_entry(item, &(*entries)[number])) return false;
    return *entries != NULL;
}

static bool read_graph(const json *signature, const char *name, graph *graph) {
    const json *from = member(signature, name, JSON_OBJECT);
    graph->name = name;
    if (!read_entries(member(from, "inputs", JSON_ARRAY), &graph->inputs, &graph->input_count)) return false;
    if (!read_entries(member(from, "outputs", JSON_ARRAY), &graph->outputs, &graph->output_count)) return false;
    graph->extents = member(from, "extents", JSON_ARRAY);
    if (!whole_of(from, "end", &graph->end)) graph->end = -1;
    graph->input_names = calloc(graph->input_count + 1, sizeof(char *));
    graph->output_names = calloc(graph->output_count + 1, sizeof(char *));
    graph->input_values = calloc(graph->input_count + 1, sizeof(OrtValue *));
    graph->output_values = calloc(graph->output_count + 1, sizeof(OrtValue *));
    graph->scalars = calloc(graph->input_count + 1, sizeof(double));
    if (!graph->input_names || !graph->output_names || !graph->input_values || !graph->output_values || !graph->scalars)
        return false;
    for (size_t i = 0; i < graph->input_count; i++) graph->input_names[i] = graph->inputs[i].name;
    for (size_t i = 0; i < graph->output_count; i++) graph->output_names[i] = graph->outputs[i].name;
    return true;
}

static size_t find_state(const burnish_session *session, const char *name) {
    for (size_t i = 0; i < session->state_count; i++)
        if (is(name, session->state[i].kind->name)) return i;
    return NONE;
}

static bool same_kind(const entry *one, const entry *other) {
    return one->type == other->type && one->rank == other->rank &&
           (one->rank == NONE || memcmp(one->shape, other->shape, one->rank * sizeof *one->shape) == 0);
}

/* Number the state entries: those of the step in its order, then those that only evaluation and prediction read. */
static bool number_state(burnish_session *session) {
    size_t most = 1;
    for (int i = 0; i < GRAPHS; i++) most += session->graphs[i].input_count;
    session->state = calloc(most, sizeof *session->state);
    if (session->state == NULL) return false;
    for (int g = STEP; g < GRAPHS; g++)
        for (size_t i = 0; i < session->graphs[g].input_count; i++) {
            const entry *entry = &session->graphs[g].inputs[i];
            if (!is_state(entry) || find_state(session, entry->name) != NONE) continue;
            state_entry *added = &session->state[session->state_count++];
            added->kind = entry;
            if (entry->type == NULL || entry->rank == NONE ||
                !size_of(entry->type->size, entry->rank, entry->shape, &added->bytes))
                return false;
        }
    for (int g = INIT; g < GRAPHS; g++) {
        graph *graph = &session->graphs[g];
        for (size_t i = 0; i < graph->input_count; i++)
            if (is_state(&graph->inputs[i])) {
                size_t found = graph->inputs[i].state = find_state(session, graph->inputs[i].name);
                if (found == NONE || !same_kind(session->state[found].kind, &graph->inputs[i])) return false;
            }
        for (size_t i = 0; i < graph->output_count; i++) {
            const char *name = graph->outputs[i].updates != NULL ? graph->outputs[i].updates
                               : g == INIT                       ? graph->outputs[i].name
                                                                 : NULL;
            if (name == NULL || g > STEP) continue;
            size_t found = graph->outputs[i].state = find_state(session, name);
            if (found == NONE || !same_kind(session->state[found].kind, &graph->outputs[i])) return false;
            if (g == STEP) session->state[found].is_updated = true;
        }
    }
    return true;
}

static burnish_status engine_failure(const burnish_session *session, OrtStatus *status, const char *doing, const char *what) {
    burnish_status result =
        fail(BURNISH_ENGINE_ERROR,
             "ONNX Runtime %s could not %s %s: %s. See that its version has the program's operators, and that memory suffices",
             OrtGetApiBase()->GetVersionString(), doing, what, session->ort->GetErrorMessage(status));
    session->ort->ReleaseStatus(status);
    return result;
}

#define ORT(call, doing, what)                                                             \
    do {                                                                                   \
        OrtStatus *ort_status_ = session->ort->call;                                       \
        if (ort_status_ != NULL) return engine_failure(session, ort_status_, doing, what); \
    } while (0)

static burnish_status make_value(const burnish_session *session, const char *name, const struct dtype_names *type, void *data,
                                 size_t rank, const int64_t *shape, OrtValue **value) {
    size_t bytes;
    if (!size_of(type->size, rank, shape, &bytes)) return fail(BURNISH_INPUT_ERROR, "The size of '%s' is too large", name);
    ORT(CreateTensorWithDataAsOrtValue(session->memory, data, bytes, shape, rank, (ONNXTensorElementDataType)type->dtype, value),
        "wrap", name);
    return BURNISH_OK;
}

static burnish_status take_memory(burnish_session *session) {
    for (size_t i = 0; i < session->state_count; i++) {
        state_entry *entry = &session->state[i];
        for (int set = 0; set < 2; set++) {
            if (set == 1 && !entry->is_updated) {
                entry->data[1] = entry->data[0];
                entry->values[1] = entry->values[0];
                continue;
            }
            /* Vector kernels read and write memory faster that begins on a cache line. */
            entry->data[set] = aligned_alloc(64, (entry->bytes / 64 + 1) * 64);
            if (entry->data[set] == NULL) return no_memory(entry->kind->name, entry->bytes);
            TRY(make_value(session, entry->kind->name, entry->kind->type, entry->data[set], entry->kind->rank, entry->kind->shape,
                           &entry->values[set]));
        }
    }
    return BURNISH_OK;
}

/* Hash what a file has left, and close it. */
static void hash_file(FILE *file, char digest[65]) {
    char block[BLOCK];
    sha256 hash;
    sha256_begin(&hash);
    for (size_t count; (count = fread(block, 1, sizeof block, file)) > 0;) sha256_add(&hash, block, count);
    fclose(file);
    sha256_text(&hash, digest);
}

/* See that a file of the program is the one that was written. */
static burnish_status check_file(const burnish_session *session, const char *name, const char *path) {
    const json *recorded = member(member(session->manifest, "files", JSON_OBJECT), name, JSON_OBJECT);
    const char *expected = text_of(recorded, "sha256");
    int64_t bytes;
    uint64_t size;
    char digest[65];
    FILE *file;
    if (expected == NULL || !whole_of(recorded, "bytes", &bytes)) return damaged(path, "program.json does not list it");
    TRY(open_file(path, &file, &size));
    if (size != (uint64_t)bytes) {
        fclose(file);
        return damaged(path, "its size is not the one that was written");
    }
    hash_file(file, digest);
    return strcmp(digest, expected) == 0 ? BURNISH_OK : has_changed(path);
}

/* See that a file is one that a package lists, in a text of lines as sha256sum writes them. */
static burnish_status check_listed(const char *list, const char *path, const char *name) {
    char digest[65], line[128], *text, *found;
    uint64_t file_size;
    size_t size;
    FILE *file;
    TRY(open_file(path, &file, &file_size));
    hash_file(file, digest);
    TRY(read_file(list, BLOCK, &text, &size));
    snprintf(line, sizeof line, "%s  %s\n", digest, name);
    found = strstr(text, line);
    bool is_listed = found != NULL && (found == text || found[-1] == '\n');
    free(text);
    if (is_listed) return BURNISH_OK;
    return fail(BURNISH_CHECKPOINT_ERROR,
                "'%s' is not the file that '%s' lists as '%s': it has changed, or belongs to another package. Pack the program "
                "again (burnish package PROGRAM --runtime c)",
                path, list, name);
}

/* See that a graph in ONNX Runtime's own format is as it was packed, and of this program. */
static burnish_status check_packed(const burnish_session *session, const char *name, const char *path) {
    char list[MAX_PATH], manifest[MAX_PATH];
    TRY(join_path(list, session->models, "SHA256SUMS", ""));
    TRY(join_path(manifest, session->folder, "program.json", ""));
    TRY(check_listed(list, manifest, "../program/program.json"));
    return check_listed(list, path, name);
}

/* Text that grows; `failed` where memory ran out, which is asked at the end. */
typedef struct buffer {
    char *data;
    size_t size, room;
    bool failed;
} buffer;

static void add(buffer *to, const void *bytes, size_t count) {
    if (to->failed || count == 0) return;
    if (count > to->room - to->size) {
        size_t room = to->room * 2 + count;
        char *grown = room < count ? NULL : realloc(to->data, room);
        if (grown == NULL) {
            to->failed = true;
            return;
        }
        to->data = grown;
        to->room = room;
    }
    memcpy(to->data + to->size, bytes, count);
    to->size += count;
}

/* ONNX files are read as protobuf writes them: fields, each with a number and, in what is touched here, a length. */
typedef struct span {
    const uint8_t *at, *end;
} span;

static bool read_varint(span *from, uint64_t *value) {
    *value = 0;
    for (int shift = 0; shift < 64 && from->at < from->end; shift += 7) {
        uint8_t byte = *from->at++;
        *value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) return true;
    }
    return false;
}

/* The next field: its number, all its bytes, and what it holds (empty unless it has a length). */
static bool read_field(span *from, unsigned *number, span *whole, span *content) {
    uint64_t tag, length;
    whole->at = from->at;
    if (!read_varint(from, &tag)) return false;
    *number = (unsigned)(tag >> 3);
    content->at = content->end = from->at;
    switch (tag & 7) {
        case 0:
            if (!read_varint(from, &length)) return false;
            length = 0;
            break;
        case 1: length = 8; break;
        case 5: length = 4; break;
        case 2:
            if (!read_varint(from, &length)) return false;
            break;
        default: return false;
    }
    if (length > (uint64_t)(from->end - from->at)) return false;
    if ((tag & 7) == 2) *content = (span){from->at, from->at + length};
    from->at += length;
    whole->end = from->at;
    return true;
}

static void add_varint(buffer *to, uint64_t value) {
    for (; value >= 0x80; value >>= 7) add(to, (char[]){(char)(value | 0x80)}, 1);
    add(to, (char[]){(char)value}, 1);
}

static void add_bytes_field(buffer *to, unsigned number, const void *bytes, size_t count) {
    add_varint(to, (uint64_t)number << 3 | 2);
    add_varint(to, count);
    add(to, bytes, count);
}

static bool is_called(span name, const char *text) {
    return strlen(text) == (size_t)(name.end - name.at) && memcmp(name.at, text, (size_t)(name.end - name.at)) == 0;
}

/* Whether a node of the graph has a field of this number, an input (1) or an output (2), of this name. */
static bool names_value(span node, unsigned field, const char *text) {
    unsigned number;
    span whole, content;
    while (node.at < node.end && read_field(&node, &number, &whole, &content))
        if (number == field && is_called(content, text)) return true;
    return false;
}

/* Find, for each output that is a next value of the state, the node that computes it, where no other node reads it. */
static void find_updates(const graph *graph, span nodes, span *updates) {
    unsigned number;
    span whole, content;
    for (size_t i = 0; i < graph->output_count; i++) {
        bool is_read = false;
        span producer = {NULL, NULL};
        for (span from = nodes;
             graph->outputs[i].state != NONE && from.at < from.end && read_field(&from, &number, &whole, &content);) {
            if (number != 1) continue;
            if (names_value(content, 1, graph->outputs[i].name)) is_read = true;
            if (names_value(content, 2, graph->outputs[i].name)) producer = whole;
        }
        for (size_t j = 0; j < i; j++)
            if (updates[j].at == producer.at) producer = (span){NULL, NULL}; /* it computes several of them */
        if (!is_read) updates[i] = producer;
    }
}

/* Copy a graph with the nodes of the updates at its end, in reverse.
 *
 * ONNX Runtime's order of execution begins with what the last node needs, and so on backwards. The updates of the layers that the
 * backward pass reaches first are then computed first, and gradients and activations freed before others are made. In the order
 * of the file it would run the whole backward pass before it computes the gradient of any weight.
 */
static bool order_updates(const graph *graph, span from, buffer *to) {
    span *updates = calloc(graph->output_count + 1, sizeof *updates), whole, content;
    unsigned number;
    bool is_read = updates != NULL;
    if (is_read) find_updates(graph, from, updates);
    while (is_read && from.at < from.end) {
        is_read = read_field(&from, &number, &whole, &content);
        bool is_update = false;
        for (size_t i = 0; is_read && number == 1 && i < graph->output_count; i++)
            is_update = is_update || updates[i].at == whole.at;
        if (is_read && !is_update) add(to, whole.at, (size_t)(whole.end - whole.at));
    }
    for (size_t i = graph->output_count; is_read && i-- > 0;)
        if (updates[i].at != NULL) add(to, updates[i].at, (size_t)(updates[i].end - updates[i].at));
    free(updates);
    return is_read && !to->failed;
}

/* Read the step's model and order its updates. */
static burnish_status read_ordered(const graph *graph, const char *path, buffer *model) {
    char *content = NULL;
    size_t size = 0;
    buffer ordered = {0};
    unsigned number;
    span whole, field;
    TRY(read_file(path, SIZE_MAX / 4, &content, &size));
    span from = {(const uint8_t *)content, (const uint8_t *)content + size};
    bool is_read = true;
    while (is_read && from.at < from.end) {
        is_read = read_field(&from, &number, &whole, &field);
        if (is_read && number == 7 && (is_read = order_updates(graph, field, &ordered)))
            add_bytes_field(model, 7, ordered.data, ordered.size);
        else if (is_read)
            add(model, whole.at, (size_t)(whole.end - whole.at));
    }
    free(content);
    free(ordered.data);
    if (is_read && !model->failed) return BURNISH_OK;
    free(model->data);
    *model = (buffer){0};
    return damaged(path, "it cannot be read as an ONNX model, or there is no memory for it");
}

static burnish_status open_graph(burnish_session *session, graph *graph) {
    static const GraphOptimizationLevel LEVELS[] = {ORT_ENABLE_ALL, ORT_ENABLE_EXTENDED, ORT_ENABLE_BASIC, ORT_DISABLE_ALL};
    char path[MAX_PATH], data[MAX_PATH], name[64];
    const OrtApi *ort = session->ort;
    OrtSessionOptions *options = NULL;
    OrtStatus *status;
    buffer ordered = {0};
    if (graph->session != NULL) return BURNISH_OK;
    snprintf(name, sizeof name, "%s.%s", graph->name, session->models != NULL ? "ort" : "onnx");
    TRY(join_path(path, session->models != NULL ? session->models : session->folder, name, ""));
    if (session->models != NULL) {
        TRY(check_packed(session, name, path));
    } else {
        TRY(check_file(session, name, path));
        TRY(join_path(data, session->folder, graph->name, ".data"));
        snprintf(name, sizeof name, "%s.data", graph->name);
        if (access(data, F_OK) == 0)
            TRY(check_file(session, name, data));
        else if (graph == &session->graphs[STEP])
            TRY(read_ordered(graph, path, &ordered)); /* constants in a file are found by the path */
    }
    (void)((status = ort->CreateSessionOptions(&options)) != NULL ||
           (status = ort->SetSessionGraphOptimizationLevel(options, LEVELS[session->options.optimization])) != NULL ||
           (status = ort->SetIntraOpNumThreads(options, session->options.threads)) != NULL ||
           (status = ort->SetInterOpNumThreads(options, 1)) != NULL || (status = ort->DisableMemPattern(options)) != NULL ||
           (status = ort->SetSessionLogSeverityLevel(options, ORT_LOGGING_LEVEL_FATAL)) != NULL ||
           (status = ort->SetDeterministicCompute(options, true)) != NULL ||
           (status = ort->AddSessionConfigEntry(options, "session.use_env_allocators", "1")) != NULL ||
           (status = ordered.size > 0
                         ? ort->CreateSessionFromArray(session->env, ordered.data, ordered.size, options, &graph->session)
                         : ort->CreateSession(session->env, path, options, &graph->session)) != NULL);
    free(ordered.data);
    if (options != NULL) ort->ReleaseSessionOptions(options);
    return status == NULL ? BURNISH_OK : engine_failure(session, status, "open", path);
}

/* One arena for all graphs that grows by what is asked for: a session's own doubles, and evaluation would add its peak to
 * training's. */
static burnish_status open_environment(burnish_session *session) {
    static pthread_mutex_t registering = PTHREAD_MUTEX_INITIALIZER;
    OrtArenaCfg *configuration = NULL;
    OrtMemoryInfo *arena = NULL;
    OrtStatus *status;
    session->ort = OrtGetApiBase()->GetApi(ORT_API_VERSION);
    if (session->ort == NULL)
        return fail(BURNISH_ENGINE_ERROR, "This ONNX Runtime (%s) is too old: use 1.18 or newer",
                    OrtGetApiBase()->GetVersionString());
    ORT(CreateEnv(ORT_LOGGING_LEVEL_FATAL, "burnish", &session->env), "start", "its environment");
    ORT(CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &arena), "describe", "memory");
    session->memory = arena;
    status = session->ort->CreateArenaCfg(0, 1, -1, -1, &configuration);
    pthread_mutex_lock(&registering); /* ONNX Runtime has one environment per process, and old ones add to it without a lock */
    if (status == NULL) status = session->ort->CreateAndRegisterAllocator(session->env, arena, configuration);
    pthread_mutex_unlock(&registering);
    if (status != NULL) session->ort->ReleaseStatus(status); /* another session of the process has registered one, which serves */
    if (configuration != NULL) session->ort->ReleaseArenaCfg(configuration);
    return BURNISH_OK;
}

static void release_outputs(burnish_session *session) {
    for (size_t i = 0; session->last != NULL && i < session->last->output_count; i++)
        if (session->last->outputs[i].state == NONE && session->last->output_values[i] != NULL) {
            session->ort->ReleaseValue(session->last->output_values[i]);
            session->last->output_values[i] = NULL;
        }
    session->last = NULL;
}

static bool is_batch(const entry *entry) { return is(entry->role, "data") || is(entry->role, "label"); }

static void release_batch(burnish_session *session, graph *graph) {
    for (size_t i = 0; i < graph->input_count; i++)
        if (is_batch(&graph->inputs[i]) && graph->input_values[i] != NULL) {
            session->ort->ReleaseValue(graph->input_values[i]);
            graph->input_values[i] = NULL;
        }
}

static const char AVERAGE[] = "opt/average/";

static bool is_average(const char *name) { return strncmp(name, AVERAGE, strlen(AVERAGE)) == 0; }

/* The name in the source of a parameter or statistic; "" of what has none. */
static const char *source_name(const entry *input) {
    const char *slash = strchr(input->name, '/');
    return slash == NULL ? "" : slash + 1;
}

/* The state entry that a graph reads where the average stands in for the parameters; the input's own where it has none. */
static size_t averaged(const burnish_session *session, const entry *input, int flags) {
    if (flags != BURNISH_AVERAGE || !is(input->role, "parameter")) return input->state;
    for (size_t i = 0; i < session->state_count; i++) {
        const char *name = session->state[i].kind->name;
        if (is_average(name) && strcmp(name + strlen(AVERAGE), source_name(input)) == 0) return i;
    }
    return input->state;
}

static burnish_status check_flags(const burnish_session *session, int flags) {
    if (flags != 0 && flags != BURNISH_AVERAGE)
        return fail(BURNISH_CONFIGURATION_ERROR,
                    "flags is %d: give 0 or BURNISH_AVERAGE, and to burnish_export BURNISH_AS_TRAINED too", flags);
    for (size_t i = 0; flags != 0 && i < session->state_count; i++)
        if (is_average(session->state[i].kind->name)) return BURNISH_OK;
    return flags == 0 ? BURNISH_OK
                      : fail(BURNISH_CONFIGURATION_ERROR,
                             "BURNISH_AVERAGE: the program's optimizer keeps no average of the parameters; give 0, or "
                             "compile with an optimizer wrapped in burnish.optim.ema or swa");
}

/* Run a graph on the batch that lies in its input values; a step and init write the other set of the state. */
static burnish_status run(burnish_session *session, graph *graph, int flags, burnish_outputs *outputs) {
    const OrtApi *ort = session->ort;
    release_outputs(session);
    for (size_t i = 0; i < graph->input_count; i++)
        if (graph->inputs[i].state != NONE)
            graph->input_values[i] = session->state[averaged(session, &graph->inputs[i], flags)].values[session->current];
    for (size_t i = 0; i < graph->output_count; i++)
        graph->output_values[i] =
            graph->outputs[i].state == NONE ? NULL : session->state[graph->outputs[i].state].values[1 - session->current];
    session->last = graph;
    ORT(Run(graph->session, NULL, graph->input_names, (const OrtValue *const *)graph->input_values, graph->input_count,
            graph->output_names, graph->output_count, graph->output_values),
        "run", graph->name);
    size_t count = 0;
    for (size_t i = 0; i < graph->output_count; i++) {
        if (graph->outputs[i].state != NONE) continue;
        burnish_tensor *tensor = &session->tensors[count++];
        OrtTensorTypeAndShapeInfo *information;
        ONNXTensorElementDataType dtype;
        ORT(GetTensorTypeAndShape(graph->output_values[i], &information), "read", graph->outputs[i].name);
        OrtStatus *status = ort->GetTensorElementType(information, &dtype);
        if (status == NULL) status = ort->GetDimensionsCount(information, &tensor->rank);
        if (status == NULL && tensor->rank <= BURNISH_MAX_RANK)
            status = ort->GetDimensions(information, tensor->shape, tensor->rank);
        ort->ReleaseTensorTypeAndShapeInfo(information);
        if (status == NULL) status = ort->GetTensorMutableData(graph->output_values[i], &tensor->data);
        if (status != NULL) return engine_failure(session, status, "read", graph->outputs[i].name);
        if (tensor->rank > BURNISH_MAX_RANK || names_of((int)dtype) == NULL)
            return fail(BURNISH_ENGINE_ERROR, "The output '%s' is of a type or rank that this client does not read",
                        graph->outputs[i].name);
        tensor->name = graph->outputs[i].name;
        tensor->dtype = (burnish_dtype)dtype;
    }
    if (outputs != NULL) *outputs = (burnish_outputs){session->tensors, count};
    return BURNISH_OK;
}

static double number_at(const void *data, burnish_dtype dtype, size_t index) {
    switch (dtype) {
        case BURNISH_FLOAT: return (double)((const float *)data)[index];
        case BURNISH_DOUBLE: return ((const double *)data)[index];
        case BURNISH_INT64: return (double)((const int64_t *)data)[index];
        case BURNISH_INT32: return (double)((const int32_t *)data)[index];
        case BURNISH_UINT32: return (double)((const uint32_t *)data)[index];
        case BURNISH_UINT8:
        case BURNISH_BOOL: return ((const uint8_t *)data)[index];
        case BURNISH_INT8: return ((const int8_t *)data)[index];
        case BURNISH_INT16: return ((const int16_t *)data)[index];
        case BURNISH_UINT16: return ((const uint16_t *)data)[index];
        case BURNISH_UINT64: return (double)((const uint64_t *)data)[index];
        default: break;
    }
    uint32_t half = ((const uint16_t *)data)[index], wide = half << 16;
    float value;
    if (dtype == BURNISH_FLOAT16) {
        double magnitude =
            ldexp((half & 0x3ff) + (half & 0x7c00 ? 1024 : 0), (int)((half & 0x7c00) >> 10) - (half & 0x7c00 ? 25 : 24));
        if ((half & 0x7c00) == 0x7c00) magnitude = half & 0x3ff ? NAN : INFINITY;
        return half & 0x8000 ? -magnitude : magnitude;
    }
    memcpy(&value, &wide, sizeof value);
    return (double)value;
}

static bool is_floating(burnish_dtype dtype) {
    return dtype == BURNISH_FLOAT || dtype == BURNISH_DOUBLE || dtype == BURNISH_FLOAT16 || dtype == BURNISH_BFLOAT16;
}

static bool is_integer(burnish_dtype dtype) {
    return dtype != BURNISH_BOOL && !is_floating(dtype) && names_of((int)dtype) != NULL;
}

static bool all_finite(const void *data, const struct dtype_names *type, size_t bytes) {
    for (size_t i = 0; is_floating(type->dtype) && i < bytes / type->size; i++)
        if (!isfinite(number_at(data, type->dtype, i))) return false;
    return true;
}

double burnish_number(const burnish_outputs *outputs, const char *name) {
    for (size_t i = 0; i < outputs->count; i++) {
        size_t elements;
        const burnish_tensor *tensor = &outputs->tensors[i];
        if (is(tensor->name, name) && size_of(1, tensor->rank, tensor->shape, &elements) && elements == 1)
            return number_at(tensor->data, tensor->dtype, 0);
    }
    return NAN;
}

static void describe_shape(char *text, size_t room, size_t rank, const int64_t *shape, const char *const *symbols) {
    size_t used = (size_t)snprintf(text, room, "[");
    for (size_t i = 0; i < rank && used < room; i++) {
        const char *comma = i == 0 ? "" : ", ";
        if (shape[i] >= 0 || symbols == NULL)
            used += (size_t)snprintf(text + used, room - used, "%s%lld", comma, (long long)shape[i]);
        else
            used += (size_t)snprintf(text + used, room - used, "%s%s", comma, symbols[i] != NULL ? symbols[i] : "?");
    }
    if (used < room) snprintf(text + used, room - used, "]");
}

/* Refuse a value outside the range of its input, and name its index. */
static burnish_status out_of_range(const entry *entry, const burnish_tensor *tensor, size_t element, double value) {
    char place[256], low[32] = "", high[32] = "", also[64] = "", signs[128], held[32];
    int64_t index[BURNISH_MAX_RANK] = {0};
    size_t rest = element;
    for (size_t axis = tensor->rank; axis-- > 0; rest /= (size_t)tensor->shape[axis])
        index[axis] = (int64_t)(rest % (size_t)tensor->shape[axis]);
    describe_shape(place, sizeof place, tensor->rank, index, NULL);
    if (entry->has_minimum) snprintf(low, sizeof low, "%lld", (long long)entry->minimum);
    if (entry->has_maximum) snprintf(high, sizeof high, "%lld", (long long)entry->maximum);
    if (entry->has_ignored) snprintf(also, sizeof also, " or %lld, which is ignored", (long long)entry->ignored);
    snprintf(held, sizeof held, is_integer(entry->type->dtype) ? "%.0f" : "%g", value);
    const char *remedy = "Number the classes from 0, and check that the model has an output for each";
    snprintf(signs, sizeof signs, "Write %s for no, which is often 0, and %s for yes", low, high);
    if (is(entry->role, "data"))
        remedy = "Number them as the model was made to read them (its vocabulary), or take a model with more rows";
    else if (entry->two_values)
        remedy = signs;
    else if (is_floating(entry->type->dtype))
        remedy = "Give the loss what it compares with, or choose a loss for values of any size";
    return fail(BURNISH_INPUT_ERROR, "The input '%s' holds %s at %s, out of range: valid are %s%s%s%s. %s", entry->name, held,
                place, low, entry->two_values ? " and " : "..", high, also, remedy);
}

static burnish_status check_range(const entry *entry, const burnish_tensor *tensor, size_t elements) {
    double minimum = entry->has_minimum ? (double)entry->minimum : -INFINITY;
    double maximum = entry->has_maximum ? (double)entry->maximum : INFINITY;
    for (size_t i = 0; (entry->has_minimum || entry->has_maximum) && i < elements; i++) {
        double value = number_at(tensor->data, tensor->dtype, i);
        bool is_outside = entry->two_values ? value != minimum && value != maximum : value < minimum || value > maximum;
        if (is_outside && !(entry->has_ignored && value == (double)entry->ignored)) return out_of_range(entry, tensor, i, value);
    }
    return BURNISH_OK;
}

static burnish_status check_extents(const graph *graph, const char *symbol, int64_t extent) {
    for (const json *rule = graph->extents != NULL ? graph->extents->child : NULL; rule != NULL; rule = rule->next) {
        int64_t multiple = 1, minimum = 1;
        whole_of(rule, "multiple", &multiple);
        whole_of(rule, "minimum", &minimum);
        if (!is(text_of(rule, "dimension"), symbol) || multiple < 1 || (extent % multiple == 0 && extent >= minimum)) continue;
        return fail(
            BURNISH_INPUT_ERROR,
            "A batch of %lld does not do for batch normalization '%s': give a multiple of %lld, and at least %lld samples",
            (long long)extent, text_of(rule, "layer") ? text_of(rule, "layer") : "?", (long long)multiple, (long long)minimum);
    }
    return BURNISH_OK;
}

static burnish_status check_tensor(const graph *graph, const entry *entry, const burnish_tensor *tensor) {
    char expected[256], actual[256];
    size_t elements;
    if (entry->type == NULL)
        return fail(BURNISH_INPUT_ERROR, "The input '%s' takes text, which this client cannot give: run the program in Python",
                    entry->name);
    if (tensor->dtype != entry->type->dtype) {
        const struct dtype_names *type = names_of((int)tensor->dtype);
        const char *reason = "";
        if (is_floating(tensor->dtype) && is_integer(entry->type->dtype))
            reason = is(entry->role, "label") ? "; class indices are integers" : "; it takes integers";
        else if (is_integer(tensor->dtype) && is_floating(entry->type->dtype) && is(entry->role, "data"))
            reason = "; scale integers (pixels: divide by 255) to what the model was made for";
        return fail(BURNISH_INPUT_ERROR, "The input '%s' has dtype %s, expected %s%s: convert it", entry->name,
                    type ? type->plain : "unknown", entry->type->plain, reason);
    }
    describe_shape(expected, sizeof expected, entry->rank, entry->shape, entry->symbols);
    if (tensor->rank > BURNISH_MAX_RANK || tensor->rank != entry->rank)
        return fail(BURNISH_INPUT_ERROR, "The input '%s' has %zu dimensions, and the program takes %zu: expected shape %s",
                    entry->name, tensor->rank, entry->rank, expected);
    describe_shape(actual, sizeof actual, tensor->rank, tensor->shape, NULL);
    for (size_t axis = 0; axis < entry->rank; axis++) {
        if (entry->shape[axis] >= 0 && entry->shape[axis] != tensor->shape[axis])
            return fail(BURNISH_INPUT_ERROR,
                        "The input '%s' has extent %lld along axis %zu, and the program takes %lld: expected shape %s, got %s",
                        entry->name, (long long)tensor->shape[axis], axis, (long long)entry->shape[axis], expected, actual);
        if (tensor->shape[axis] < 0 || (entry->shape[axis] < 0 && tensor->shape[axis] == 0))
            return fail(BURNISH_INPUT_ERROR, "The input '%s' is empty along axis %zu (got %s): leave empty batches out",
                        entry->name, axis, actual);
        if (entry->symbols[axis] != NULL) TRY(check_extents(graph, entry->symbols[axis], tensor->shape[axis]));
    }
    if (!size_of(entry->type->size, tensor->rank, tensor->shape, &elements) || (tensor->data == NULL && elements > 0))
        return fail(BURNISH_INPUT_ERROR, "The input '%s' has no data, or more than memory holds (shape %s): give its array",
                    entry->name, actual);
    return check_range(entry, tensor, elements / entry->type->size);
}

/* Inputs of one symbolic extent, such as the batch, are to agree about it. */
static burnish_status check_agreement(const graph *graph, const burnish_tensor *const *given) {
    for (size_t i = 0; i < graph->input_count; i++)
        for (size_t j = 0; given[i] != NULL && j < i; j++)
            for (size_t a = 0; given[j] != NULL && a < graph->inputs[i].rank; a++)
                for (size_t b = 0; b < graph->inputs[j].rank; b++)
                    if (graph->inputs[i].symbols[a] != NULL && is(graph->inputs[j].symbols[b], graph->inputs[i].symbols[a]) &&
                        given[i]->shape[a] != given[j]->shape[b])
                        return fail(BURNISH_INPUT_ERROR,
                                    "The inputs '%s' and '%s' disagree about '%s': %lld and %lld. Give both for the same samples",
                                    graph->inputs[j].name, graph->inputs[i].name, graph->inputs[i].symbols[a],
                                    (long long)given[j]->shape[b], (long long)given[i]->shape[a]);
    return BURNISH_OK;
}

static bool has_label(const graph *graph, const char *name) {
    for (size_t i = 0; i < graph->input_count; i++)
        if (is(graph->inputs[i].role, "label") && is(name, graph->inputs[i].name)) return true;
    return false;
}

static bool has_input(const graph *graph, const char *name) {
    for (size_t i = 0; i < graph->input_count; i++)
        if (is_batch(&graph->inputs[i]) && is(name, graph->inputs[i].name)) return true;
    return false;
}

/* Check a batch, and wrap its arrays, which are not copied, as the graph's inputs. */
static burnish_status take_batch(burnish_session *session, graph *graph, const burnish_tensor *batch, size_t count) {
    if (batch == NULL && count > 0) return is_null("The batch", "give as many arrays as its count says");
    const burnish_tensor **given = calloc(graph->input_count + 1, sizeof *given);
    burnish_status status = given == NULL ? no_memory("the batch", graph->input_count * sizeof *given) : BURNISH_OK;
    for (size_t k = 0; status == BURNISH_OK && k < count; k++) {
        size_t i = 0;
        while (i < graph->input_count && !(is_batch(&graph->inputs[i]) && is(batch[k].name, graph->inputs[i].name))) i++;
        bool is_known = has_input(&session->graphs[STEP], batch[k].name) || has_input(&session->graphs[PREDICT], batch[k].name);
        if (i < graph->input_count)
            status = given[i] != NULL
                         ? fail(BURNISH_INPUT_ERROR, "The batch has the input '%s' twice: leave one out", batch[k].name)
                         : check_tensor(graph, &graph->inputs[i], &batch[k]);
        else if ((graph == &session->graphs[PREDICT] && has_label(&session->graphs[STEP], batch[k].name)) ||
                 (graph == &session->graphs[FEATURES] && is_known))
            continue; /* labels are not used */
        else if (has_input(&session->graphs[FEATURES], batch[k].name))
            status = fail(BURNISH_INPUT_ERROR,
                          "The batch has the input '%s', in whose place this program takes features: give what burnish_features "
                          "or burnish_cache_features returns",
                          batch[k].name);
        else
            status = fail(BURNISH_INPUT_ERROR,
                          "The batch has an unexpected input '%s': leave it out; docs of the program name what it takes",
                          batch[k].name ? batch[k].name : "(no name)");
        if (status == BURNISH_OK) given[i] = &batch[k];
    }
    for (size_t i = 0; status == BURNISH_OK && i < graph->input_count; i++)
        if (is_batch(&graph->inputs[i]) && given[i] == NULL)
            status = fail(BURNISH_INPUT_ERROR, "The batch lacks the input '%s': add it to the batch", graph->inputs[i].name);
    if (status == BURNISH_OK) status = check_agreement(graph, given);
    for (size_t i = 0; status == BURNISH_OK && i < graph->input_count; i++)
        if (given[i] != NULL)
            status = make_value(session, given[i]->name, graph->inputs[i].type, given[i]->data, given[i]->rank, given[i]->shape,
                                &graph->input_values[i]);
    free(given);
    return status;
}

static burnish_status run_on_batch(burnish_session *session, int which, const burnish_tensor *batch, size_t count, int flags,
                                   burnish_outputs *outputs) {
    TRY(check_session(session));
    graph *graph = &session->graphs[which];
    TRY(check_flags(session, flags));
    burnish_status status = take_batch(session, graph, batch, count);
    if (status == BURNISH_OK) status = open_graph(session, graph);
    if (status == BURNISH_OK) status = run(session, graph, flags, outputs);
    release_batch(session, graph);
    return status;
}

burnish_status burnish_evaluate(burnish_session *session, const burnish_tensor *batch, size_t count, int flags,
                                burnish_outputs *outputs) {
    return run_on_batch(session, EVALUATE, batch, count, flags, outputs);
}

burnish_status burnish_predict(burnish_session *session, const burnish_tensor *batch, size_t count, int flags,
                               burnish_outputs *outputs) {
    return run_on_batch(session, PREDICT, batch, count, flags, outputs);
}

bool burnish_takes(const burnish_session *session, const char *name) { return has_input(&session->graphs[STEP], name); }

int64_t burnish_sample_axis(const burnish_session *session, const char *name) {
    for (int i = 0; i < GRAPHS; i++)
        for (size_t j = 0; j < session->graphs[i].input_count; j++)
            if (is(session->graphs[i].inputs[j].name, name)) return session->graphs[i].inputs[j].sample_axis;
    return 0;
}

bool burnish_has_features(const burnish_session *session) { return session->graphs[FEATURES].output_count > 0; }

static burnish_status check_features(const burnish_session *session) {
    TRY(check_session(session));
    if (burnish_has_features(session)) return BURNISH_OK;
    return fail(BURNISH_CONFIGURATION_ERROR,
                "The program has no features that are computed once: compile it with --cached-features auto, or with the name of "
                "the value that they are");
}

burnish_status burnish_features(burnish_session *session, const burnish_tensor *batch, size_t count, burnish_outputs *outputs) {
    TRY(check_features(session));
    return run_on_batch(session, FEATURES, batch, count, 0, outputs);
}

int64_t burnish_step_count(const burnish_session *session) {
    size_t found = find_state(session, "step");
    return found == NONE || session->state[found].bytes != sizeof(int64_t)
               ? 0
               : *(int64_t *)session->state[found].data[session->current];
}

/* Whether a hyperparameter is a figure, such as `monitored`: it is new for one step, and NaN, its default, where nothing is. */
static bool is_figure(const entry *input) {
    return is(input->role, "hyperparameter") && input->has_default && isnan(input->default_value);
}

/* Put a number behind the value that the graph reads as its scalar input. */
static void set_scalar(graph *graph, size_t input, double value) {
    float narrow = (float)value;
    if (graph->inputs[input].type->dtype == BURNISH_FLOAT)
        memcpy(&graph->scalars[input], &narrow, sizeof narrow);
    else
        graph->scalars[input] = value;
}

burnish_status burnish_step(burnish_session *session, const burnish_tensor *batch, size_t count, burnish_outputs *outputs) {
    TRY(check_session(session));
    graph *step = &session->graphs[STEP];
    burnish_outputs own;
    int64_t steps = burnish_step_count(session);
    if (step->end >= 0 && steps >= step->end)
        return fail(BURNISH_CONFIGURATION_ERROR,
                    "The learning-rate schedule of this program ends after %lld steps, and the state has taken %lld: compile "
                    "with a schedule of more steps, or with past_end='hold' to go on at its last rate",
                    (long long)step->end, (long long)steps);
    for (size_t i = 0; i < step->input_count; i++)
        if (is(step->inputs[i].role, "hyperparameter") && !step->inputs[i].has_default)
            return fail(BURNISH_CONFIGURATION_ERROR, "The hyperparameter '%s' has no default: give it with burnish_set",
                        step->inputs[i].name);
    if (outputs == NULL) outputs = &own;
    TRY(run_on_batch(session, STEP, batch, count, 0, outputs));
    for (size_t i = 0; i < step->output_count; i++) {
        double value = burnish_number(outputs, step->outputs[i].name);
        if (is(step->outputs[i].role, "loss") && !isfinite(value))
            return fail(BURNISH_NON_FINITE_LOSS_ERROR,
                        "The %s at step %lld is %s. The state is kept as it was before this step. Look for NaN or infinite "
                        "values in the batch, lower the learning rate (lr), or clip the gradients",
                        step->outputs[i].name, (long long)steps, isnan(value) ? "nan" : value > 0 ? "inf" : "-inf");
    }
    session->current = 1 - session->current;
    for (size_t i = 0; i < step->input_count; i++)
        if (is_figure(&step->inputs[i])) set_scalar(step, i, NAN);
    return BURNISH_OK;
}

burnish_status burnish_set(burnish_session *session, const char *name, double value) {
    TRY(check_session(session));
    graph *step = &session->graphs[STEP];
    for (size_t i = 0; i < step->input_count; i++) {
        entry *input = &step->inputs[i];
        if (!is(input->role, "hyperparameter") || !is(name, input->name)) continue;
        if (isinf((float)value) || ((isnan(value) || value < 0) && !is_figure(input)))
            return fail(BURNISH_CONFIGURATION_ERROR,
                        "The hyperparameter '%s' is %g: give one finite number that is not negative, such as 0.01", name, value);
        if (!input->has_default)
            *input = (entry){.name = input->name, .role = input->role, .type = input->type, .state = NONE, .has_default = true};
        set_scalar(step, i, value);
        return BURNISH_OK;
    }
    for (size_t i = 0; i < step->output_count; i++)
        if (is(step->outputs[i].role, "rate") && is(name, step->outputs[i].name))
            return fail(BURNISH_CONFIGURATION_ERROR,
                        "This program computes '%s' from the step, by the schedule that it was compiled with: leave it, or "
                        "compile with a number",
                        name);
    char names[256] = "";
    for (size_t i = 0; i < step->input_count; i++)
        if (is(step->inputs[i].role, "hyperparameter"))
            snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", *names ? ", " : "", step->inputs[i].name);
    return fail(BURNISH_CONFIGURATION_ERROR, "There is no hyperparameter '%s'; a step of this program takes %s",
                name ? name : "(no name)", *names ? names : "none");
}

/* Features by the number of a sample, in an open hash table: the features of one sample lie in one block. */
typedef struct row {
    int64_t sample;
    unsigned char *data; /* NULL: the place is free */
} row;

struct burnish_cache {
    burnish_session *session;
    row *rows;
    size_t room, count, limit, bytes; /* room is a power of two */
    int64_t computed;
    burnish_tensor *features; /* of the batch that was asked for last */
    size_t feature_count, row_bytes, capacity;
};

/* A cache keeps samples by the first axis of what it is given, and of what the backbone computes. */
static burnish_status check_first_axis(const entry *entries, size_t count) {
    for (size_t i = 0; i < count; i++)
        if ((is(entries[i].role, "data") || is(entries[i].role, "output")) && entries[i].sample_axis != 0)
            return fail(BURNISH_CONFIGURATION_ERROR,
                        "'%s' has %s%.0lld, and a cache keeps samples of the first axis: run burnish_features on each batch, or "
                        "export the model with its samples first",
                        entries[i].name, entries[i].sample_axis < 0 ? "no samples" : "its samples along axis ",
                        (long long)(entries[i].sample_axis < 0 ? 0 : entries[i].sample_axis));
    return BURNISH_OK;
}

burnish_status burnish_cache_open(burnish_session *session, size_t limit, burnish_cache **cache) {
    *cache = NULL;
    TRY(check_features(session));
    TRY(check_first_axis(session->graphs[FEATURES].inputs, session->graphs[FEATURES].input_count));
    TRY(check_first_axis(session->graphs[FEATURES].outputs, session->graphs[FEATURES].output_count));
    burnish_cache *opened = calloc(1, sizeof *opened);
    if (opened == NULL) return no_memory("the cache", sizeof *opened);
    *opened = (burnish_cache){.session = session, .limit = limit == 0 ? BURNISH_CACHE_LIMIT : limit, .room = 64};
    opened->rows = calloc(opened->room, sizeof(row));
    opened->features = calloc(session->graphs[FEATURES].output_count, sizeof(burnish_tensor));
    if (opened->rows == NULL || opened->features == NULL) {
        burnish_cache_close(opened);
        return no_memory("the cache", 64 * sizeof(row));
    }
    *cache = opened;
    return BURNISH_OK;
}

void burnish_cache_close(burnish_cache *cache) {
    if (cache == NULL) return;
    for (size_t i = 0; cache->rows != NULL && i < cache->room; i++) free(cache->rows[i].data);
    for (size_t i = 0; i < cache->feature_count; i++) free(cache->features[i].data);
    free(cache->rows);
    free(cache->features);
    free(cache);
}

int64_t burnish_cache_computed(const burnish_cache *cache) { return cache->computed; }

/* The place of a sample in the table, or the one that it would get. */
static row *find_row(const burnish_cache *cache, int64_t sample) {
    size_t place = (size_t)((uint64_t)sample * 0x9e3779b97f4a7c15u >> 32) & (cache->room - 1);
    while (cache->rows[place].data != NULL && cache->rows[place].sample != sample) place = (place + 1) & (cache->room - 1);
    return &cache->rows[place];
}

bool burnish_cache_has(const burnish_cache *cache, const int64_t *samples, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (find_row(cache, samples[i])->data == NULL) return false;
    return true;
}

/* Keep a block in the table, which takes it over; false where the limit, or memory, is reached. What is there stays: data that
 * are gone through again and again would push every sample out before it comes back. */
static bool keep_row(burnish_cache *cache, int64_t sample, unsigned char *data) {
    if (cache->row_bytes > cache->limit - cache->bytes) return false;
    if (2 * (cache->count + 1) > cache->room) {
        burnish_cache grown = *cache;
        grown.room = 2 * cache->room;
        grown.rows = calloc(grown.room, sizeof(row));
        if (grown.rows == NULL) return false;
        for (size_t i = 0; i < cache->room; i++)
            if (cache->rows[i].data != NULL) *find_row(&grown, cache->rows[i].sample) = cache->rows[i];
        free(cache->rows);
        *cache = grown;
    }
    *find_row(cache, sample) = (row){sample, data};
    cache->count++;
    cache->bytes += cache->row_bytes;
    return true;
}

/* The bytes of one sample in an array whose first axis counts them. */
static size_t bytes_of_sample(const burnish_tensor *array) {
    const struct dtype_names *type = names_of((int)array->dtype);
    size_t bytes = 0;
    return type != NULL && size_of(type->size, array->rank - 1, array->shape + 1, &bytes) ? bytes : 0;
}

static burnish_status check_samples(const burnish_tensor *array, size_t count) {
    if (array->rank > 0 && array->rank <= BURNISH_MAX_RANK && array->shape[0] == (int64_t)count && array->data != NULL)
        return BURNISH_OK;
    return fail(BURNISH_INPUT_ERROR,
                "'%s' does not have one entry for each of %zu samples along its first axis: give such, or compile "
                "with another value as --cached-features",
                array->name ? array->name : "(no name)", count);
}

/* Note of what kind the features are, which is the same for all samples. */
static burnish_status note_features(burnish_cache *cache, const burnish_outputs *computed, size_t count) {
    size_t bytes = 0;
    for (size_t i = 0; i < computed->count; i++) {
        const burnish_tensor *feature = &computed->tensors[i], *before = &cache->features[i];
        TRY(check_samples(feature, count));
        bytes += bytes_of_sample(feature);
        if (cache->feature_count > 0 && (feature->rank != before->rank || memcmp(feature->shape + 1, before->shape + 1,
                                                                                 (feature->rank - 1) * sizeof(int64_t)) != 0))
            return fail(BURNISH_INPUT_ERROR,
                        "The feature '%s' has another shape for these samples than for those before: bring samples "
                        "to one shape",
                        feature->name);
    }
    for (size_t i = 0; cache->feature_count == 0 && i < computed->count; i++) {
        cache->features[i] = computed->tensors[i];
        cache->features[i].data = NULL;
    }
    cache->feature_count = computed->count;
    cache->row_bytes = bytes;
    return BURNISH_OK;
}

/* What is known of the samples of a call. */
typedef struct lookup {
    const int64_t *samples;
    size_t count, missing_count;
    size_t *missing;      /* where samples stand that are not kept, each sample once */
    size_t *first;        /* where a sample that is not kept stands first */
    unsigned char **rows; /* of each sample */
    bool *is_loose;       /* whether the block is in no table */
} lookup;

/* Copy the missing samples of the batch's arrays; the caller frees what `selected` holds. */
static burnish_status select_samples(const lookup *lookup, const burnish_tensor *batch, size_t batch_count,
                                     burnish_tensor *selected) {
    for (size_t i = 0; i < batch_count; i++) {
        TRY(check_samples(&batch[i], lookup->count));
        size_t bytes = bytes_of_sample(&batch[i]);
        selected[i] = batch[i];
        selected[i].shape[0] = (int64_t)lookup->missing_count;
        selected[i].data = malloc(bytes * lookup->missing_count + 1);
        if (selected[i].data == NULL) return no_memory(batch[i].name, bytes * lookup->missing_count);
        for (size_t k = 0; k < lookup->missing_count; k++)
            memcpy((char *)selected[i].data + k * bytes, (const char *)batch[i].data + lookup->missing[k] * bytes, bytes);
    }
    return BURNISH_OK;
}

/* Run the backbone on the samples that are not kept, and keep what comes out. */
static burnish_status compute_missing(burnish_cache *cache, lookup *lookup, const burnish_tensor *batch, size_t batch_count) {
    burnish_tensor *selected = calloc(batch_count + 1, sizeof *selected);
    burnish_outputs computed = {NULL, 0};
    burnish_status status = selected == NULL ? no_memory("the batch", batch_count) : BURNISH_OK;
    if (status == BURNISH_OK) status = select_samples(lookup, batch, batch_count, selected);
    if (status == BURNISH_OK) status = burnish_features(cache->session, selected, batch_count, &computed);
    if (status == BURNISH_OK) status = note_features(cache, &computed, lookup->missing_count);
    for (size_t i = 0; selected != NULL && i < batch_count; i++) free(selected[i].data);
    free(selected);
    for (size_t k = 0; status == BURNISH_OK && k < lookup->missing_count; k++) {
        size_t at = lookup->missing[k], offset = 0;
        unsigned char *block = malloc(cache->row_bytes + 1);
        if (block == NULL) return no_memory("the features", cache->row_bytes);
        for (size_t i = 0; i < computed.count; i++) {
            size_t bytes = bytes_of_sample(&computed.tensors[i]);
            memcpy(block + offset, (const char *)computed.tensors[i].data + k * bytes, bytes);
            offset += bytes;
        }
        lookup->rows[at] = block;
        lookup->is_loose[at] = !keep_row(cache, lookup->samples[at], block);
        cache->computed++;
    }
    return status;
}

/* Put the features of the samples together. */
static burnish_status join_rows(burnish_cache *cache, const lookup *lookup, burnish_outputs *outputs) {
    size_t offset = 0;
    for (size_t i = 0; i < cache->feature_count; i++) {
        burnish_tensor *feature = &cache->features[i];
        size_t bytes = bytes_of_sample(feature);
        if (lookup->count > cache->capacity) {
            void *grown = realloc(feature->data, bytes * lookup->count + 1);
            if (grown == NULL) return no_memory(feature->name, bytes * lookup->count);
            feature->data = grown;
        }
        feature->shape[0] = (int64_t)lookup->count;
        for (size_t k = 0; k < lookup->count; k++) memcpy((char *)feature->data + k * bytes, lookup->rows[k] + offset, bytes);
        offset += bytes;
    }
    if (lookup->count > cache->capacity) cache->capacity = lookup->count;
    if (outputs != NULL) *outputs = (burnish_outputs){cache->features, cache->feature_count};
    return BURNISH_OK;
}

/* Where each sample's features are, and which samples have none; one that comes twice is missing once. */
static burnish_status look_up(const burnish_cache *cache, lookup *lookup) {
    size_t room = 64;
    while (room / 2 < lookup->count) room *= 2;
    burnish_cache seen = {.rows = calloc(room, sizeof(row)), .room = room}; /* its rows point to where a sample first stands */
    burnish_status status = seen.rows == NULL ? no_memory("the samples", room * sizeof(row)) : BURNISH_OK;
    for (size_t i = 0; status == BURNISH_OK && i < lookup->count; i++) {
        if (lookup->samples[i] < 0)
            status = fail(BURNISH_INPUT_ERROR, "The number of a sample is %lld: number the samples of your data from 0",
                          (long long)lookup->samples[i]);
        if (status != BURNISH_OK || (lookup->rows[i] = find_row(cache, lookup->samples[i])->data) != NULL) continue;
        row *first = find_row(&seen, lookup->samples[i]);
        lookup->first[i] = i;
        if (first->data != NULL)
            lookup->first[i] = (size_t)((size_t *)(void *)first->data - lookup->first);
        else
            *first = (row){lookup->samples[i], (unsigned char *)&lookup->first[lookup->missing[lookup->missing_count++] = i]};
    }
    free(seen.rows);
    return status;
}

burnish_status burnish_cache_features(burnish_cache *cache, const int64_t *samples, size_t count, const burnish_tensor *batch,
                                      size_t batch_count, burnish_outputs *outputs) {
    if (cache == NULL) return is_null("The cache", "give one that burnish_cache_open made; its status says why it made none");
    if (samples == NULL || count == 0)
        return fail(BURNISH_INPUT_ERROR, "There are no samples: give the number of each sample of the batch");
    lookup lookup = {.samples = samples, .count = count};
    lookup.missing = calloc(count, sizeof *lookup.missing);
    lookup.first = calloc(count, sizeof *lookup.first);
    lookup.rows = calloc(count, sizeof *lookup.rows);
    lookup.is_loose = calloc(count, sizeof *lookup.is_loose);
    bool has_memory = lookup.missing != NULL && lookup.first != NULL && lookup.rows != NULL && lookup.is_loose != NULL;
    burnish_status status = has_memory ? look_up(cache, &lookup) : no_memory("the samples", count * sizeof *lookup.rows);
    if (status == BURNISH_OK && lookup.missing_count > 0) status = compute_missing(cache, &lookup, batch, batch_count);
    for (size_t i = 0; status == BURNISH_OK && i < count; i++)
        if (lookup.rows[i] == NULL) lookup.rows[i] = lookup.rows[lookup.first[i]];
    if (status == BURNISH_OK) status = join_rows(cache, &lookup, outputs);
    for (size_t i = 0; has_memory && i < count; i++)
        if (lookup.is_loose[i]) free(lookup.rows[i]);
    free(lookup.missing);
    free(lookup.first);
    free(lookup.rows);
    free(lookup.is_loose);
    return status;
}

/* A safetensors file: the size of a JSON header, the header, and the bytes of the arrays. */
typedef struct state_file {
    const char *path;
    FILE *file;
    char *text;
    json *header;
    uint64_t begin, size; /* of the arrays */
} state_file;

static const json *metadata_of(const state_file *file) { return member(file->header, "__metadata__", JSON_OBJECT); }

static void close_state_file(state_file *file) {
    if (file->file != NULL) fclose(file->file);
    free(file->text);
    free(file->header);
}

static burnish_status read_header(state_file *file) {
    uint64_t length;
    if (file->size < 8 || fread(&length, 1, 8, file->file) != 8 || length > file->size - 8 || length > MAX_JSON_BYTES)
        return damaged(file->path, "it is no whole safetensors file");
    file->text = malloc((size_t)length + 1);
    if (file->text == NULL) return no_memory(file->path, (size_t)length);
    if (fread(file->text, 1, (size_t)length, file->file) != length) return damaged(file->path, "it ends too early");
    file->text[length] = 0;
    file->begin = 8 + length;
    file->size -= file->begin;
    TRY(parse_json(file->path, file->text, (size_t)length, &file->header));
    return file->header->kind == JSON_OBJECT ? BURNISH_OK : damaged(file->path, "its header is no JSON object");
}

/* Find where an array lies, which is to be of the kind of a state entry; `offset` counts from the beginning of the arrays. */
static burnish_status find_array(const state_file *file, const state_entry *entry, uint64_t *offset) {
    const json *array = member(file->header, entry->kind->name, JSON_OBJECT), *shape = member(array, "shape", JSON_ARRAY);
    const json *offsets = member(array, "data_offsets", JSON_ARRAY), *begin = offsets ? offsets->child : NULL,
               *end = begin ? begin->next : NULL;
    const char *what = "is missing, or has another type, shape or size";
    if (shape == NULL || end == NULL || end->next != NULL || !is(text_of(array, "dtype"), entry->kind->type->safetensors))
        return damaged_entry(file->path, entry->kind->name, what);
    size_t axis = 0;
    for (const json *extent = shape->child; extent != NULL; extent = extent->next, axis++)
        if (axis >= entry->kind->rank || extent->kind != JSON_NUMBER || !extent->is_whole ||
            extent->whole != entry->kind->shape[axis])
            return damaged_entry(file->path, entry->kind->name, what);
    if (axis != entry->kind->rank || !begin->is_whole || !end->is_whole || begin->whole < 0 || end->whole < begin->whole ||
        (uint64_t)end->whole > file->size || (uint64_t)(end->whole - begin->whole) != entry->bytes)
        return damaged_entry(file->path, entry->kind->name, what);
    *offset = (uint64_t)begin->whole;
    return BURNISH_OK;
}

static burnish_status read_array(const state_file *file, const state_entry *entry, void *data) {
    uint64_t offset;
    TRY(find_array(file, entry, &offset));
    if (fseeko(file->file, (off_t)(file->begin + offset), SEEK_SET) != 0 ||
        fread(data, 1, entry->bytes, file->file) != entry->bytes)
        return damaged(file->path, "it ends too early");
    return BURNISH_OK;
}

static burnish_status read_weights(burnish_session *session) {
    char path[MAX_PATH];
    state_file file = {.path = path};
    TRY(join_path(path, session->folder, "state", ".safetensors"));
    TRY(check_file(session, "state.safetensors", path));
    burnish_status status = open_file(path, &file.file, &file.size);
    if (status == BURNISH_OK) status = read_header(&file);
    if (status == BURNISH_OK) status = take_memory(session);
    for (size_t i = 0; status == BURNISH_OK && i < session->state_count; i++)
        if (is(session->state[i].kind->role, "parameter") || is(session->state[i].kind->role, "statistic"))
            status = read_array(&file, &session->state[i], session->state[i].data[0]);
    close_state_file(&file);
    return status;
}

/* Wrap the numbers that a graph takes: hyperparameters, at their defaults, and the seed. */
static burnish_status make_scalars(burnish_session *session, graph *graph) {
    for (size_t i = 0; i < graph->input_count; i++) {
        entry *input = &graph->inputs[i];
        bool is_seed = is(input->role, "seed");
        if (!is_seed && !is(input->role, "hyperparameter")) {
            if (!is_batch(input) && input->state == NONE)
                return damaged(session->folder, "a graph has an input of an unknown role");
            if (is_batch(input) && input->rank == NONE) return damaged(session->folder, "an input has no shape");
            continue;
        }
        if (input->rank != 0 || input->type == NULL ||
            (is_seed ? input->type->dtype != BURNISH_INT64 : !is_floating(input->type->dtype) || input->type->size < 4))
            return damaged(session->folder, "a hyperparameter or the seed is no scalar of a known type");
        if (is_seed)
            memcpy(&graph->scalars[i], &session->options.seed, sizeof(int64_t));
        else if (input->has_default)
            set_scalar(graph, i, input->default_value);
        TRY(make_value(session, input->name, input->type, &graph->scalars[i], 0, NULL, &graph->input_values[i]));
    }
    return BURNISH_OK;
}

/* Make what the init graph computes: the optimizer's first state, the random key, the step. */
static burnish_status run_init(burnish_session *session) {
    graph *init = &session->graphs[INIT];
    bool *is_made = calloc(session->state_count + 1, sizeof(bool));
    burnish_status status = is_made == NULL ? no_memory("the state", session->state_count) : open_graph(session, init);
    if (status == BURNISH_OK) status = run(session, init, 0, NULL);
    for (size_t i = 0; status == BURNISH_OK && i < init->output_count; i++) {
        state_entry *entry = &session->state[init->outputs[i].state];
        is_made[init->outputs[i].state] = true;
        memcpy(entry->data[0], entry->data[1], entry->data[0] == entry->data[1] ? 0 : entry->bytes);
    }
    for (size_t i = 0; status == BURNISH_OK && i < session->state_count; i++)
        if (!is_made[i] && !is(session->state[i].kind->role, "parameter") && !is(session->state[i].kind->role, "statistic"))
            status = damaged(session->folder, "its init graph does not make all of the state");
    free(is_made);
    release_outputs(session);
    if (init->session != NULL) session->ort->ReleaseSession(init->session); /* it is not run again */
    init->session = NULL;
    return status;
}

/* See that program.json is one that this client reads, and as it was written; `raw` are its bytes. */
static burnish_status check_manifest(const burnish_session *session, const char *path, char *raw, size_t size) {
    const char *digest = text_of(session->manifest, DIGEST_KEY);
    int64_t version;
    sha256 hash;
    if (!is(text_of(session->manifest, "format"), "burnish program") || !whole_of(session->manifest, "version", &version))
        return damaged(path, "it describes no program");
    if (version != FORMAT_VERSION)
        return fail(BURNISH_CHECKPOINT_ERROR,
                    "The program in '%s' is of format version %lld, and the C client reads version %d: %s%s",
                    session->folder, (long long)version, FORMAT_VERSION,
                    version > FORMAT_VERSION ? "update the C client" : "make it again from the model, with burnish compile MODEL -o ",
                    version > FORMAT_VERSION ? "" : session->folder);
    if (!clear_digest(raw, size, digest)) return has_changed(path);
    sha256_begin(&hash);
    sha256_add(&hash, raw, size);
    return check_digest(path, &hash, digest);
}

static burnish_status read_manifest(burnish_session *session, const char *path) {
    struct stat found;
    char *raw = NULL;
    size_t size = 0;
    if (stat(session->folder, &found) != 0 || !S_ISDIR(found.st_mode))
        return fail(BURNISH_CHECKPOINT_ERROR, "'%s' is no folder: give the folder that program.save or burnish compile wrote",
                    session->folder);
    TRY(read_file(path, MAX_JSON_BYTES, &raw, &size));
    session->manifest_text = malloc(size + 1);
    if (session->manifest_text != NULL) memcpy(session->manifest_text, raw, size + 1);
    burnish_status status = session->manifest_text == NULL ? no_memory(path, size)
                                                           : parse_json(path, session->manifest_text, size, &session->manifest);
    if (status == BURNISH_OK) status = check_manifest(session, path, raw, size);
    free(raw);
    return status;
}

/* Mark the state entries that no step changes while adapters train. */
static bool mark_base(burnish_session *session) {
    const json *base = member(session->manifest, "base", JSON_ARRAY);
    for (const json *name = base != NULL ? base->child : NULL; name != NULL; name = name->next) {
        size_t found = name->kind == JSON_STRING ? find_state(session, name->text) : NONE;
        if (found == NONE || session->state[found].is_updated || session->state[found].is_base) return false;
        session->state[found].is_base = true;
        session->base_count++;
    }
    return base != NULL;
}

static burnish_status read_signature(burnish_session *session, const char *path) {
    const json *signature = member(session->manifest, "signature", JSON_OBJECT);
    size_t most = 1;
    if (text_of(member(session->manifest, "identity", JSON_OBJECT), "program") == NULL)
        return damaged(path, "it names no identity");
    for (int g = 0; g < GRAPHS; g++) {
        if (g == FEATURES && member(signature, GRAPH_NAMES[g], JSON_OBJECT) == NULL) continue;
        if (!read_graph(signature, GRAPH_NAMES[g], &session->graphs[g])) return damaged(path, "its signature cannot be read");
        most = session->graphs[g].output_count > most ? session->graphs[g].output_count : most;
    }
    if (!number_state(session)) return damaged(path, "its graphs disagree about the state");
    if (!mark_base(session)) return damaged(path, "its base is no list of state entries that stay as they are");
    session->tensors = calloc(most, sizeof(burnish_tensor));
    return session->tensors == NULL ? no_memory("outputs", most * sizeof(burnish_tensor)) : BURNISH_OK;
}

static burnish_status open_program(burnish_session *session) {
    char path[MAX_PATH];
    if (session->options.threads < 0 || session->options.threads > MAX_THREADS || session->options.optimization < 0 || session->options.optimization > 3)
        return fail(BURNISH_CONFIGURATION_ERROR,
                    "threads is %d and optimization %d: give threads from 0, which leaves it to ONNX Runtime, to %d, and an "
                    "optimization from 0 to 3",
                    session->options.threads, session->options.optimization, MAX_THREADS);
    TRY(join_path(path, session->folder, "program.json", ""));
    TRY(read_manifest(session, path));
    TRY(read_signature(session, path));
    TRY(open_environment(session));
    TRY(read_weights(session));
    for (int g = 0; g < GRAPHS; g++) TRY(make_scalars(session, &session->graphs[g]));
    return run_init(session);
}

burnish_status burnish_open(const char *folder, const burnish_options *options, burnish_session **session) {
    burnish_session *opened = calloc(1, sizeof *opened);
    *session = NULL;
    if (opened == NULL) return no_memory("the session", sizeof *opened);
    if (folder == NULL) {
        free(opened);
        return is_null("The folder", "give the one that program.save or burnish compile wrote");
    }
    if (options != NULL) opened->options = *options;
    opened->folder = strdup(folder);
    if (options != NULL && options->models != NULL) opened->models = strdup(options->models);
    opened->extra = strdup("{}");
    bool has_memory =
        opened->folder != NULL && opened->extra != NULL && (options == NULL || (opened->models != NULL) == (options->models != NULL));
    burnish_status status = has_memory ? open_program(opened) : no_memory("the session", strlen(folder));
    if (status == BURNISH_OK)
        *session = opened;
    else
        burnish_close(opened);
    return status;
}

void burnish_close(burnish_session *session) {
    if (session == NULL) return;
    const OrtApi *ort = session->ort;
    release_outputs(session);
    for (int g = 0; g < GRAPHS; g++) {
        graph *graph = &session->graphs[g];
        for (size_t i = 0; ort != NULL && graph->input_values != NULL && i < graph->input_count; i++)
            if (graph->inputs[i].state == NONE && graph->input_values[i] != NULL) ort->ReleaseValue(graph->input_values[i]);
        if (graph->session != NULL) ort->ReleaseSession(graph->session);
        free(graph->inputs);
        free(graph->outputs);
        free(graph->input_names);
        free(graph->output_names);
        free(graph->input_values);
        free(graph->output_values);
        free(graph->scalars);
    }
    for (size_t i = 0; i < session->state_count; i++)
        for (int set = 0; set <= (session->state[i].is_updated ? 1 : 0); set++) {
            if (session->state[i].values[set] != NULL) ort->ReleaseValue(session->state[i].values[set]);
            free(session->state[i].data[set]);
        }
    if (session->memory != NULL) ort->ReleaseMemoryInfo(session->memory);
    if (session->env != NULL) ort->ReleaseEnv(session->env);
    free(session->state);
    free(session->tensors);
    free(session->manifest);
    free(session->manifest_text);
    free(session->folder);
    free(session->models);
    free(session->extra);
    free_metadata(&session->metadata);
    free(session);
}

burnish_status burnish_state_at(burnish_session *session, size_t number, burnish_tensor *tensor) {
    TRY(check_session(session));
    if (number >= session->state_count)
        return fail(BURNISH_CONFIGURATION_ERROR, "There is no state entry %zu: the program has %zu", number,
                    session->state_count);
    const entry *kind = session->state[number].kind;
    *tensor = (burnish_tensor){kind->name, kind->type->dtype, kind->rank, {0}, session->state[number].data[session->current]};
    memcpy(tensor->shape, kind->shape, sizeof tensor->shape);
    return BURNISH_OK;
}

burnish_status burnish_state(burnish_session *session, const char *name, burnish_tensor *tensor) {
    TRY(check_session(session));
    size_t found = find_state(session, name);
    return found != NONE ? burnish_state_at(session, found, tensor)
                         : fail(BURNISH_CONFIGURATION_ERROR, "There is no state entry '%s': burnish_state_at lists them",
                                name ? name : "(no name)");
}

burnish_status burnish_write_state(burnish_session *session, const burnish_tensor *given) {
    burnish_tensor own = {0};
    if (given == NULL || given->data == NULL) return is_null("The entry, or its data,", "give what burnish_state returns for it");
    TRY(burnish_state(session, given->name, &own));
    if (given->dtype != own.dtype || given->rank != own.rank ||
        memcmp(given->shape, own.shape, own.rank * sizeof *own.shape) != 0)
        return fail(BURNISH_CONFIGURATION_ERROR,
                    "The state entry '%s' has another type or shape: give what burnish_state returns for it", given->name);
    memmove(own.data, given->data, session->state[find_state(session, given->name)].bytes);
    *session->base_hash = 0;
    return BURNISH_OK;
}

const char *burnish_extra(const burnish_session *session) { return session->extra; }

static void add_format(buffer *to, const char *format, ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    add(to, text, length < 0 ? 0 : (size_t)length < sizeof text ? (size_t)length : sizeof text - 1);
}

static void add_json_text(buffer *to, const char *text, size_t count) {
    add(to, "\"", 1);
    for (size_t i = 0; i < count; i++) {
        const char *escaped = "\"\\\b\f\n\r\t", *letters = "\"\\bfnrt", *found = text[i] == 0 ? NULL : strchr(escaped, text[i]);
        if (found != NULL)
            add_format(to, "\\%c", letters[found - escaped]);
        else if ((unsigned char)text[i] < 0x20)
            add_format(to, "\\u%04x", text[i]);
        else
            add(to, text + i, 1);
    }
    add(to, "\"", 1);
}

static void add_pair(buffer *to, const char *key, const char *text, size_t count) {
    if (to->size > 0 && to->data[to->size - 1] != '{') add(to, ",", 1);
    add_json_text(to, key, strlen(key));
    add(to, ":", 1);
    add_json_text(to, text, count);
}

static int by_name(const void *one, const void *other) {
    const state_entry *const *a = one, *const *b = other;
    return strcmp((*a)->kind->name, (*b)->kind->name); /* UTF-8 has the order of code points */
}

static int by_place(const void *one, const void *other) {
    const state_entry *const *a = one, *const *b = other;
    size_t first = (*a)->kind->type->size, second = (*b)->kind->type->size;
    return first != second ? (first < second ? 1 : -1) : by_name(one, other);
}

static const state_entry **sorted_state(const burnish_session *session, int (*order)(const void *, const void *)) {
    const state_entry **sorted = calloc(session->state_count + 1, sizeof *sorted);
    for (size_t i = 0; sorted != NULL && i < session->state_count; i++) sorted[i] = &session->state[i];
    if (sorted != NULL) qsort(sorted, session->state_count, sizeof *sorted, order);
    return sorted;
}

static void add_number(sha256 *hash, uint64_t number) { sha256_add(hash, &number, sizeof number); }

static void add_text(sha256 *hash, const char *text) {
    add_number(hash, strlen(text));
    sha256_add(hash, text, strlen(text));
}

/* The SHA-256 of names, types, shapes and bytes of the base, in the order of names; "" where the program has none. */
static burnish_status hash_base(burnish_session *session) {
    sha256 hash;
    if (session->base_count == 0 || *session->base_hash != 0) return BURNISH_OK;
    const state_entry **named = sorted_state(session, by_name);
    if (named == NULL) return no_memory("the checkpoint", session->state_count);
    sha256_begin(&hash);
    for (size_t i = 0; i < session->state_count; i++) {
        const entry *kind = named[i]->kind;
        if (!named[i]->is_base) continue;
        add_text(&hash, kind->name);
        add_text(&hash, kind->type->safetensors);
        add_number(&hash, kind->rank);
        for (size_t axis = 0; axis < kind->rank; axis++) add_number(&hash, (uint64_t)kind->shape[axis]);
        sha256_add(&hash, named[i]->data[session->current], named[i]->bytes);
    }
    sha256_text(&hash, session->base_hash);
    free(named);
    return BURNISH_OK;
}

/* The header that Python writes, byte for byte. */
static void add_checkpoint_header(buffer *header, const burnish_session *session, const state_entry *const *placed,
                                  const char *extra) {
    const json *identity = member(session->manifest, "identity", JSON_OBJECT), *graphs = member(identity, "graphs", JSON_OBJECT);
    const char *program = text_of(identity, "program");
    buffer hashes = {0};
    char number[32];
    size_t offset = 0;
    add(&hashes, "{", 1);
    for (const json *hash = graphs != NULL ? graphs->child : NULL; hash != NULL; hash = hash->next)
        if (hash->kind == JSON_STRING) {
            if (hash != graphs->child) add(&hashes, ", ", 2);
            add_json_text(&hashes, hash->key, strlen(hash->key));
            add(&hashes, ": ", 2);
            add_json_text(&hashes, hash->text, strlen(hash->text));
        }
    add(&hashes, "}", 1);
    add(header, "{\"__metadata__\":{", 17);
    add_format(header, "\"%s\":\"%s%s\"", DIGEST_KEY, DIGEST_PREFIX, ZEROS);
    add_pair(header, "format", "burnish checkpoint", 18);
    add_pair(header, "version", FORMAT_TEXT, strlen(FORMAT_TEXT));
    snprintf(number, sizeof number, "%lld", (long long)burnish_step_count(session));
    add_pair(header, "step", number, strlen(number));
    add_pair(header, "program", program, strlen(program));
    add_pair(header, "graphs", hashes.data, hashes.size);
    add_pair(header, "engine", "onnxruntime", 11);
    add_pair(header, "extra", extra, strlen(extra));
    if (session->metadata.text != NULL) add_pair(header, "metadata", session->metadata.text, strlen(session->metadata.text));
    if (session->base_count > 0) add_pair(header, "base", session->base_hash, strlen(session->base_hash));
    add(header, "}", 1);
    for (size_t i = 0; i < session->state_count; i++) {
        const entry *kind = placed[i]->kind;
        if (placed[i]->is_base) continue;
        add(header, ",", 1);
        add_json_text(header, kind->name, strlen(kind->name));
        add_format(header, ":{\"dtype\":\"%s\",\"shape\":[", kind->type->safetensors);
        for (size_t axis = 0; axis < kind->rank; axis++)
            add_format(header, axis == 0 ? "%lld" : ",%lld", (long long)kind->shape[axis]);
        add_format(header, "],\"data_offsets\":[%zu,%zu]}", offset, offset + placed[i]->bytes);
        offset += placed[i]->bytes;
    }
    add(header, "}", 1);
    while (header->size % 8 != 0 && !header->failed) add(header, " ", 1);
    header->failed = header->failed || hashes.failed;
    free(hashes.data);
}

/* Write the digest of a checkpoint into its header, in place of the zeros that begin it. */
static void set_digest(const burnish_session *session, const state_entry *const *placed, buffer *header) {
    char text[DIGITS + 1];
    uint64_t length = header->size;
    sha256 hash;
    sha256_begin(&hash);
    sha256_add(&hash, &length, 8);
    sha256_add(&hash, header->data, header->size);
    for (size_t i = 0; i < session->state_count; i++)
        if (!placed[i]->is_base) sha256_add(&hash, placed[i]->data[session->current], placed[i]->bytes);
    sha256_text(&hash, text);
    memcpy(strchr(header->data, '0'), text, DIGITS);
}

static burnish_status check_extra(const char *extra) {
    char *copy = strdup(extra);
    json *values = NULL;
    if (copy == NULL) return no_memory("extra", strlen(extra));
    const char *fault = read_json(copy, strlen(copy), &values);
    bool is_object = fault == NULL && values->kind == JSON_OBJECT;
    free(values);
    free(copy);
    if (is_object) return BURNISH_OK;
    return fail(BURNISH_CONFIGURATION_ERROR, "extra of the checkpoint %s: give a JSON object such as {\"batch\": 3}, or NULL",
                fault != NULL ? fault : "is no JSON object");
}

burnish_status burnish_save(burnish_session *session, const char *path, const char *extra) {
    new_file file;
    buffer header = {0};
    TRY(check_session(session));
    TRY(check_path(path));
    if (extra == NULL) extra = "{}";
    TRY(check_extra(extra));
    for (size_t i = 0; i < session->state_count; i++)
        if (session->state[i].is_updated &&
            !all_finite(session->state[i].data[session->current], session->state[i].kind->type, session->state[i].bytes))
            return fail(BURNISH_CHECKPOINT_ERROR,
                        "No checkpoint was written to '%s': '%s' holds NaN or infinite values. An earlier file there is "
                        "untouched: restore "
                        "it and lower the learning rate (lr), or clip the gradients",
                        path, session->state[i].kind->name);
    TRY(hash_base(session));
    const state_entry **placed = sorted_state(session, by_place);
    if (placed != NULL) add_checkpoint_header(&header, session, placed, extra);
    burnish_status status = placed == NULL || header.failed ? no_memory("the checkpoint", header.size) : BURNISH_OK;
    if (status == BURNISH_OK && (header.size > MAX_JSON_BYTES || count_json(header.data, header.size) > MAX_JSON_VALUES))
        status = fail(BURNISH_CONFIGURATION_ERROR,
                      "extra of the checkpoint has more bytes or values than would be read again: keep them in a file of their own");
    if (status == BURNISH_OK) status = begin_file(&file, path);
    if (status == BURNISH_OK) {
        uint64_t length = header.size;
        set_digest(session, placed, &header);
        put(&file, &length, 8);
        put(&file, header.data, header.size);
        for (size_t i = 0; i < session->state_count; i++)
            if (!placed[i]->is_base) put(&file, placed[i]->data[session->current], placed[i]->bytes);
        status = end_file(&file, path, BURNISH_OK);
    }
    free(placed);
    free(header.data);
    return status;
}

/* Tell whether an array differs from what the state has. */
static burnish_status compare_array(const burnish_session *session, const state_file *file, const state_entry *entry,
                                    bool *differs) {
    char block[BLOCK];
    uint64_t offset;
    TRY(find_array(file, entry, &offset));
    *differs = false;
    if (fseeko(file->file, (off_t)(file->begin + offset), SEEK_SET) != 0) return damaged(file->path, "it ends too early");
    for (size_t done = 0, count; done < entry->bytes && !*differs; done += count) {
        count = entry->bytes - done < BLOCK ? entry->bytes - done : BLOCK;
        if (fread(block, 1, count, file->file) != count) return damaged(file->path, "it ends too early");
        *differs = memcmp(block, (const char *)entry->data[session->current] + done, count) != 0;
    }
    return BURNISH_OK;
}

/* See that a safetensors file is as it was written. */
static burnish_status check_state_file(const state_file *file) {
    const char *digest = text_of(metadata_of(file), DIGEST_KEY);
    char block[BLOCK];
    size_t head = (size_t)file->begin;
    uint64_t left = file->size;
    sha256 hash;
    char *raw = malloc(head);
    if (raw == NULL) return no_memory(file->path, head);
    rewind(file->file);
    bool is_found = fread(raw, 1, head, file->file) == head && clear_digest(raw + 8, head - 8, digest);
    sha256_begin(&hash);
    sha256_add(&hash, raw, head);
    free(raw);
    if (!is_found) return has_changed(file->path);
    for (size_t count; left > 0; left -= count) {
        count = left < BLOCK ? (size_t)left : BLOCK;
        if (fread(block, 1, count, file->file) != count) return damaged(file->path, "it ends too early");
        sha256_add(&hash, block, count);
    }
    return check_digest(file->path, &hash, digest);
}

/* Whether a checkpoint leaves an entry of the state out. */
static bool is_left_out(const state_file *file, const state_entry *entry) {
    return entry->is_base && text_of(metadata_of(file), "base") != NULL;
}

/* See that a checkpoint of adapters goes with the weights that are there. */
static burnish_status check_base(burnish_session *session, const char *path, const char *base) {
    if (base == NULL) return BURNISH_OK;
    TRY(hash_base(session));
    return strcmp(base, session->base_hash) == 0
               ? BURNISH_OK
               : fail(BURNISH_CHECKPOINT_ERROR,
                      "The checkpoint '%s' holds adapters of another model: the weights next to them had the SHA-256 %.16s..., "
                      "and those of this program have %.16s.... Compile the file that they were trained on",
                      path, base, session->base_hash);
}

static burnish_status check_checkpoint(burnish_session *session, const state_file *file) {
    const json *header = metadata_of(file);
    const char *version = text_of(header, "version"), *base = text_of(header, "base");
    size_t count = 0, expected = session->state_count - (base != NULL ? session->base_count : 0);
    uint64_t offset;
    if (!is(text_of(header, "format"), "burnish checkpoint"))
        return fail(
            BURNISH_CHECKPOINT_ERROR,
            "'%s' is a safetensors file, but not a burnish checkpoint: give a file that burnish_save or save_checkpoint wrote",
            file->path);
    if (!is(version, FORMAT_TEXT))
        return fail(BURNISH_CHECKPOINT_ERROR,
                    "The checkpoint '%s' is of format version %s, and the C client reads version %d: %s", file->path,
                    version ? version : "?", FORMAT_VERSION,
                    version != NULL && strtol(version, NULL, 10) > FORMAT_VERSION
                        ? "update the C client"
                        : "go on with the burnish that wrote it, or train again without it");
    TRY(check_state_file(file));
    if (text_of(header, "journal") != NULL)
        return fail(BURNISH_CHECKPOINT_ERROR,
                    "'%s' is a checkpoint with a journal, which the C client does not read: restore it in Python and save it whole",
                    file->path);
    if (base != NULL && session->base_count == 0)
        return fail(BURNISH_CHECKPOINT_ERROR,
                    "The checkpoint '%s' holds adapters alone, and the program has none: compile the model that it was made "
                    "with, with its adapters (burnish.surgery.lora)",
                    file->path);
    if (!is(text_of(header, "program"), text_of(member(session->manifest, "identity", JSON_OBJECT), "program")))
        return fail(BURNISH_CHECKPOINT_ERROR,
                    "The checkpoint '%s' was made with another program: open the one that it was made with, or start without it",
                    file->path);
    if (text_of(header, "extra") == NULL) return damaged(file->path, "its header lacks 'extra'");
    TRY(check_base(session, file->path, base));
    for (const json *array = file->header->child; array != NULL; array = array->next) count += !is(array->key, "__metadata__");
    if (count != expected) return damaged(file->path, "it does not hold exactly the program's state");
    for (size_t i = 0; i < session->state_count; i++)
        if (!is_left_out(file, &session->state[i])) TRY(find_array(file, &session->state[i], &offset));
    return BURNISH_OK;
}

/* Read the state into the set that is not current; entries that have one buffer, and differ, into memory of their own first. */
static burnish_status read_state(burnish_session *session, const state_file *file) {
    void **apart = calloc(session->state_count + 1, sizeof *apart);
    burnish_status status = apart == NULL ? no_memory("the checkpoint", session->state_count) : BURNISH_OK;
    for (size_t i = 0; status == BURNISH_OK && i < session->state_count; i++) {
        state_entry *entry = &session->state[i];
        bool differs = !is_left_out(file, entry);
        if (differs && !entry->is_updated) status = compare_array(session, file, entry, &differs);
        if (status != BURNISH_OK || !differs) continue;
        if (!entry->is_updated && (apart[i] = malloc(entry->bytes + 1)) == NULL)
            status = no_memory(entry->kind->name, entry->bytes);
        else
            status = read_array(file, entry, entry->is_updated ? entry->data[1 - session->current] : apart[i]);
    }
    for (size_t i = 0; apart != NULL && i < session->state_count; i++) {
        if (status == BURNISH_OK && apart[i] != NULL) {
            memcpy(session->state[i].data[0], apart[i], session->state[i].bytes);
            *session->base_hash = 0;
        }
        free(apart[i]);
    }
    free(apart);
    return status;
}

/* Take over the state of a checkpoint that is open. */
static burnish_status take_checkpoint(burnish_session *session, state_file *file) {
    metadata metadata = {0};
    char *extra = NULL;
    burnish_status status = read_header(file);
    if (status == BURNISH_OK) status = check_checkpoint(session, file);
    if (status == BURNISH_OK) status = read_metadata(file->path, text_of(metadata_of(file), "metadata"), &metadata);
    if (status == BURNISH_OK && (extra = strdup(text_of(metadata_of(file), "extra"))) == NULL)
        status = no_memory("the checkpoint", strlen(file->path));
    if (status == BURNISH_OK) status = read_state(session, file);
    if (status == BURNISH_OK) {
        session->current = 1 - session->current;
        free(session->extra);
        session->extra = extra;
        extra = NULL;
        if (metadata.text != NULL) {
            free_metadata(&session->metadata);
            session->metadata = metadata;
            metadata = (struct metadata){0};
        }
    }
    free(extra);
    free_metadata(&metadata);
    return status;
}

burnish_status burnish_restore(burnish_session *session, const char *path) {
    TRY(check_session(session));
    TRY(check_path(path));
    state_file file = {.path = path};
    burnish_status status = open_file(path, &file.file, &file.size);
    if (status == BURNISH_OK) status = take_checkpoint(session, &file);
    close_state_file(&file);
    return status;
}

/* Messages of onnx.proto that hold names of values, and the fields in which they do. */
typedef enum message_kind {
    GRAPH_MESSAGE,
    SUBGRAPH_MESSAGE,
    NODE_MESSAGE,
    ATTRIBUTE_MESSAGE,
    VALUE_MESSAGE,
    TENSOR_MESSAGE,
    NAME,
    OTHER,
    LEFT_OUT
} message_kind;

/* The entry of the state that a name stands for, by its name in the program or in the source; NULL. */
static const entry *weight_of(const graph *predict, span name, bool by_source) {
    for (size_t i = 0; i < predict->input_count; i++) {
        const char *own = by_source ? source_name(&predict->inputs[i]) : predict->inputs[i].name;
        if (is_state(&predict->inputs[i]) && strlen(own) == (size_t)(name.end - name.at) &&
            memcmp(own, name.at, strlen(own)) == 0)
            return &predict->inputs[i];
    }
    return NULL;
}

static message_kind kind_of_field(const graph *predict, message_kind in, unsigned number, span content) {
    unsigned inner;
    span whole, name;
    switch (in) {
        case GRAPH_MESSAGE:
            if (number == 11 && read_field(&content, &inner, &whole, &name) && inner == 1 && weight_of(predict, name, false))
                return LEFT_OUT;
            return number == 1 ? NODE_MESSAGE : number == 5 ? TENSOR_MESSAGE : number == 13 ? VALUE_MESSAGE : OTHER;
        case SUBGRAPH_MESSAGE:
            return number == 1                    ? NODE_MESSAGE
                   : number == 5                  ? TENSOR_MESSAGE
                   : number >= 11 && number <= 13 ? VALUE_MESSAGE
                                                  : OTHER;
        case NODE_MESSAGE: return number <= 2 ? NAME : number == 5 ? ATTRIBUTE_MESSAGE : OTHER;
        case ATTRIBUTE_MESSAGE: return number == 6 || number == 11 ? SUBGRAPH_MESSAGE : OTHER;
        case VALUE_MESSAGE: return number == 1 ? NAME : OTHER;
        case TENSOR_MESSAGE: return number == 8 ? NAME : OTHER;
        default: return OTHER;
    }
}

/* Copy a message with the weights under the source's names. A value that took such a name meanwhile gets another one. */
static bool rename_weights(const graph *predict, message_kind kind, span from, buffer *to, int depth) {
    unsigned number;
    span whole, content;
    if (depth > 2 * MAX_DEPTH) return false;
    while (from.at < from.end) {
        if (!read_field(&from, &number, &whole, &content)) return false;
        message_kind inner = kind_of_field(predict, kind, number, content);
        buffer copy = {0};
        if (inner == LEFT_OUT) continue;
        if (inner == OTHER) {
            add(to, whole.at, (size_t)(whole.end - whole.at));
        } else if (inner == NAME) {
            const entry *weight = weight_of(predict, content, false);
            if (weight != NULL)
                content = (span){(const uint8_t *)source_name(weight),
                                 (const uint8_t *)source_name(weight) + strlen(source_name(weight))};
            add(&copy, content.at, (size_t)(content.end - content.at));
            if (weight == NULL && weight_of(predict, content, true)) add(&copy, ":value", 6);
        } else if (!rename_weights(predict, inner, content, &copy, depth + 1)) {
            free(copy.data);
            return false;
        }
        if (inner != OTHER) add_bytes_field(to, number, copy.data, copy.size);
        to->failed = to->failed || copy.failed;
        free(copy.data);
    }
    return !to->failed;
}

/* All of a weight's TensorProto but its raw bytes, of which only the length is there. */
static void add_tensor_head(buffer *to, const entry *weight, size_t bytes, const char *location, size_t offset) {
    buffer dimensions = {0};
    for (size_t axis = 0; axis < weight->rank; axis++) add_varint(&dimensions, (uint64_t)weight->shape[axis]);
    if (weight->rank > 0) add_bytes_field(to, 1, dimensions.data, dimensions.size);
    add_varint(to, 2 << 3);
    add_varint(to, (uint64_t)weight->type->dtype);
    add_bytes_field(to, 8, source_name(weight), strlen(source_name(weight)));
    if (location == NULL) {
        add_varint(to, 9 << 3 | 2);
        add_varint(to, bytes);
    } else {
        char numbers[2][32];
        snprintf(numbers[0], sizeof *numbers, "%zu", offset);
        snprintf(numbers[1], sizeof *numbers, "%zu", bytes);
        const char *pairs[3][2] = {{"location", location}, {"offset", numbers[0]}, {"length", numbers[1]}};
        for (size_t i = 0; i < 3; i++) {
            buffer pair = {0};
            add_bytes_field(&pair, 1, pairs[i][0], strlen(pairs[i][0]));
            add_bytes_field(&pair, 2, pairs[i][1], strlen(pairs[i][1]));
            add_bytes_field(to, 13, pair.data, pair.size);
            free(pair.data);
        }
        add_varint(to, 14 << 3);
        add_varint(to, 1);
    }
    to->failed = to->failed || dimensions.failed;
    free(dimensions.data);
}

/* What an export is made of: the model's fields around its graph, the graph without weights, and each weight in turn. */
typedef struct exported {
    const burnish_session *session;
    const graph *predict;
    int flags, set;
    buffer around, graph;
    const char *location; /* of the weights' file; NULL where they are in the model */
    new_file data;        /* that file, which is open, and so locked, until the model that names it is in its place */
} exported;

static const state_entry *weight_at(const exported *export, size_t input) {
    const entry *entry = &export->predict->inputs[input];
    return is_state(entry) ? &export->session->state[averaged(export->session, entry, export->flags)] : NULL;
}

/* Write the weights as initializers, or only count their bytes where `file` is NULL. */
static burnish_status put_weights(const exported *export, new_file *file, size_t *bytes) {
    size_t offset = 0;
    *bytes = 0;
    for (size_t i = 0; i < export->predict->input_count; i++) {
        const state_entry *weight = weight_at(export, i);
        if (weight == NULL) continue;
        buffer head = {0}, tag = {0};
        size_t raw = export->location == NULL ? weight->bytes : 0;
        add_tensor_head(&head, &export->predict->inputs[i], weight->bytes, export->location, offset);
        add_varint(&tag, 5 << 3 | 2);
        add_varint(&tag, head.size + raw);
        *bytes += tag.size + head.size + raw;
        offset += weight->bytes;
        bool failed = head.failed || tag.failed;
        if (file != NULL && !failed) {
            put(file, tag.data, tag.size);
            put(file, head.data, head.size);
            put(file, weight->data[export->set], raw);
        }
        free(head.data);
        free(tag.data);
        if (failed) return no_memory("the export", weight->bytes);
    }
    return BURNISH_OK;
}

/* Write the weights into <name>-<their hash>.data beside the export: the model that is there keeps its own until it is replaced.
 */
static burnish_status put_data_file(exported *export, const char *path, char *data) {
    char folder[MAX_PATH], digest[65];
    const char *name;
    sha256 hash;
    sha256_begin(&hash);
    for (size_t i = 0; i < export->predict->input_count; i++)
        if (weight_at(export, i) != NULL) sha256_add(&hash, weight_at(export, i)->data[export->set], weight_at(export, i)->bytes);
    sha256_text(&hash, digest);
    TRY(split_path(path, folder, &name));
    snprintf(data, MAX_PATH, "%.*s-%.16s.data", MAX_PATH - 64, path, digest);
    TRY(begin_file(&export->data, data));
    for (size_t i = 0; i < export->predict->input_count; i++)
        if (weight_at(export, i) != NULL)
            put(&export->data, weight_at(export, i)->data[export->set], weight_at(export, i)->bytes);
    burnish_status status = place_file(&export->data, data, BURNISH_OK);
    if (status == BURNISH_OK) export->location = strrchr(data, '/') != NULL ? strrchr(data, '/') + 1 : data;
    return status;
}

/* Whether the metadata have another value for an entry of the model's metadata_props. */
static bool is_replaced(const metadata *metadata, span property) {
    for (const json *item = metadata->values != NULL ? metadata->values->child : NULL; item != NULL; item = item->next)
        if (names_value(property, 1, item->key)) return true;
    return false;
}

static burnish_status split_model(exported *export, const char *path, span from) {
    unsigned number;
    span whole, content;
    bool is_read = true;
    while (is_read && from.at < from.end) {
        is_read = read_field(&from, &number, &whole, &content);
        if (is_read && number == 7)
            is_read = rename_weights(export->predict, GRAPH_MESSAGE, content, &export->graph, 0);
        else if (is_read && !(number == 14 && is_replaced(&export->session->metadata, content)))
            add(&export->around, whole.at, (size_t)(whole.end - whole.at));
    }
    if (export->around.failed || export->graph.failed) return no_memory("the export", export->graph.size);
    return is_read ? BURNISH_OK : damaged(path, "it cannot be read as an ONNX model");
}

/* The entries of metadata_props that a restored checkpoint brought. */
static void add_metadata(buffer *to, const metadata *metadata) {
    for (const json *item = metadata->values != NULL ? metadata->values->child : NULL; item != NULL; item = item->next) {
        buffer pair = {0};
        add_bytes_field(&pair, 1, item->key, strlen(item->key));
        add_bytes_field(&pair, 2, item->text, strlen(item->text));
        add_bytes_field(to, 14, pair.data, pair.size);
        to->failed = to->failed || pair.failed;
        free(pair.data);
    }
}

static burnish_status write_export(exported *export, const char *path) {
    char data[MAX_PATH] = "";
    size_t bytes = 0, weights = 0;
    new_file file;
    buffer tag = {0};
    for (size_t i = 0; i < export->predict->input_count; i++)
        if (weight_at(export, i) != NULL) weights += weight_at(export, i)->bytes;
    if (weights > BURNISH_ONE_FILE_LIMIT) TRY(put_data_file(export, path, data));
    TRY(put_weights(export, NULL, &bytes));
    add_metadata(&export->around, &export->session->metadata);
    add_varint(&tag, 7 << 3 | 2);
    add_varint(&tag, export->graph.size + bytes);
    burnish_status status = tag.failed || export->around.failed ? no_memory("the export", bytes) : begin_file(&file, path);
    if (status == BURNISH_OK) {
        put(&file, export->around.data, export->around.size);
        put(&file, tag.data, tag.size);
        put(&file, export->graph.data, export->graph.size);
        status = put_weights(export, &file, &bytes);
        status = end_file(&file, path, status);
        if (status == BURNISH_OK) remove_beside(path, "", "-", 16, ".data", export->location != NULL ? export->location : "");
    }
    free(tag.data);
    return status;
}

/* Whether a message has an entry of metadata_props, its field of this number, with a key. */
static bool has_property(span message, unsigned field, const char *key) {
    unsigned number;
    span whole, content;
    while (message.at < message.end && read_field(&message, &number, &whole, &content))
        if (number == field && names_value(content, 1, key)) return true;
    return false;
}

/* What a graph has that an export has not; NULL. */
static const char *trained_form(span graph) {
    unsigned number;
    span whole, node;
    while (graph.at < graph.end && read_field(&graph, &number, &whole, &node)) {
        if (number != 1) continue;
        if (has_property(node, 9, "burnish.pruning")) return "masks of pruning, which an export applies";
        if (has_property(node, 9, "burnish.quantization")) return "quantized weights, which an export holds as integers";
    }
    return NULL;
}

/* Refuse a model whose export is another graph than the one that trains, which this client does not make. */
static burnish_status check_form(span model) {
    unsigned number;
    span whole, content, rest = model;
    const char *what = has_property(model, 14, "burnish.adapters") ? "adapters, which an export merges into their weights" : NULL;
    while (what == NULL && rest.at < rest.end && read_field(&rest, &number, &whole, &content))
        if (number == 7) what = trained_form(content);
    if (what == NULL) return BURNISH_OK;
    return fail(BURNISH_UNSUPPORTED_OPERATOR_ERROR,
                "The model has %s, and this client does not. Save a checkpoint, and export that in Python: session.restore(path), "
                "session.export('tuned.onnx'); or give BURNISH_AS_TRAINED, to write the graph as it trains",
                what);
}

burnish_status burnish_export(burnish_session *session, const char *path, int flags) {
    TRY(check_session(session));
    int average = flags & ~BURNISH_AS_TRAINED;
    exported export = {.session = session, .predict = &session->graphs[PREDICT], .flags = average, .set = session->current};
    char source[MAX_PATH], *model = NULL;
    size_t size = 0;
    TRY(check_flags(session, average));
    TRY(join_path(source, session->folder, "predict.onnx", ""));
    TRY(check_file(session, "predict.onnx", source));
    TRY(join_path(source, session->folder, "predict.data", ""));
    if (access(source, F_OK) == 0)
        return fail(BURNISH_CONFIGURATION_ERROR,
                    "The predict graph of '%s' keeps more than 1 GiB of constants in a file of its own: export it in Python",
                    session->folder);
    TRY(join_path(source, session->folder, "predict.onnx", ""));
    TRY(read_file(source, SIZE_MAX / 4, &model, &size));
    span whole = {(const uint8_t *)model, (const uint8_t *)model + size};
    burnish_status status = flags == average ? check_form(whole) : BURNISH_OK;
    if (status == BURNISH_OK) status = split_model(&export, source, whole);
    free(model);
    if (status == BURNISH_OK && path != NULL) status = write_export(&export, path);
    if (export.location != NULL) fclose(export.data.file);
    free(export.around.data);
    free(export.graph.data);
    return status;
}
