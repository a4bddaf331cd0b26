/* A disk that is slow and says what it does: preloaded into a process, it delays writes, syncs and renames below one folder.

SLOW_DISK_FOLDER: part of a path; files elsewhere are left alone.   SLOW_DISK_READS: part of a path whose reads are slow too.
SLOW_DISK_RATE: bytes in a second.   SLOW_DISK_SYNC, SLOW_DISK_RENAME: seconds each takes.
SLOW_DISK_LOG: a line as each begins and as it ends: seconds of CLOCK_MONOTONIC, pid, begin or end, operation, path. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static double setting(const char *name) {
    const char *text = getenv(name);
    return text ? atof(text) : 0;
}

static int lies_in(const char *path, const char *name) {
    const char *folder = getenv(name);
    return folder && *folder && path && strstr(path, folder) != NULL;
}

static int path_of(int descriptor, char *path, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, size - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return path[0] == '/';
}

static void wait_for(double seconds) {
    if (seconds <= 0) return;
    struct timespec time = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    nanosleep(&time, NULL);
}

static void say(const char *when, const char *what, const char *path) {
    static int log = -1;
    static ssize_t (*real)(int, const void *, size_t);
    const char *name = getenv("SLOW_DISK_LOG");
    if (!name) return;
    if (!real) real = dlsym(RTLD_NEXT, "write");
    if (log < 0) log = open(name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    char line[4352];
    int length = snprintf(line, sizeof line, "%ld.%09ld %d %s %s %s\n", (long)now.tv_sec, now.tv_nsec, getpid(), when, what, path);
    if (log >= 0 && length > 0) real(log, line, length < (int)sizeof line ? length : (int)sizeof line - 1);
}

static void transfer(const char *what, const char *path, ssize_t bytes) {
    double rate = setting("SLOW_DISK_RATE");
    if (bytes <= 0 || rate <= 0) return;
    say("begin", what, path);
    wait_for(bytes / rate);
    say("end", what, path);
}

#define REAL(name, type, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = dlsym(RTLD_NEXT, name)

ssize_t write(int descriptor, const void *data, size_t size) {
    REAL("write", ssize_t, int, const void *, size_t);
    char path[4096];
    ssize_t done = real(descriptor, data, size);
    if (done > 0 && path_of(descriptor, path, sizeof path) && lies_in(path, "SLOW_DISK_FOLDER")) transfer("write", path, done);
    return done;
}

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    REAL("writev", ssize_t, int, const struct iovec *, int);
    char path[4096];
    ssize_t done = real(descriptor, parts, count);
    if (done > 0 && path_of(descriptor, path, sizeof path) && lies_in(path, "SLOW_DISK_FOLDER")) transfer("write", path, done);
    return done;
}

ssize_t read(int descriptor, void *data, size_t size) {
    REAL("read", ssize_t, int, void *, size_t);
    char path[4096];
    ssize_t done = real(descriptor, data, size);
    if (done > 0 && path_of(descriptor, path, sizeof path) && lies_in(path, "SLOW_DISK_READS")) transfer("hash", path, done);
    return done;
}

static int synced(int descriptor, int result) {
    char path[4096];
    if (path_of(descriptor, path, sizeof path) && lies_in(path, "SLOW_DISK_FOLDER")) {
        say("begin", "sync", path);
        wait_for(setting("SLOW_DISK_SYNC"));
        say("end", "sync", path);
    }
    return result;
}

int fsync(int descriptor) {
    REAL("fsync", int, int);
    return synced(descriptor, real(descriptor));
}

int fdatasync(int descriptor) {
    REAL("fdatasync", int, int);
    return synced(descriptor, real(descriptor));
}

/* Half of the wait comes before the rename and half after it, so that a kill meets both sides. */
int rename(const char *from, const char *to) {
    REAL("rename", int, const char *, const char *);
    if (!lies_in(to, "SLOW_DISK_FOLDER")) return real(from, to);
    say("begin", "rename", to);
    wait_for(setting("SLOW_DISK_RENAME") / 2);
    int result = real(from, to);
    wait_for(setting("SLOW_DISK_RENAME") / 2);
    say("end", "rename", to);
    return result;
}
