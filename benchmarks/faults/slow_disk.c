/* A slow disk: preloaded into a process, it delays writes, syncs and renames below one folder.

SLOW_DISK_FOLDER: part of a path; files elsewhere are left alone.   SLOW_DISK_READS: part of a path whose reads are slow too.
SLOW_DISK_RATE: bytes in a second.   SLOW_DISK_SYNC, SLOW_DISK_RENAME: seconds each takes. */

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

static void transfer(ssize_t bytes) {
    double rate = setting("SLOW_DISK_RATE");
    if (bytes > 0 && rate > 0) wait_for(bytes / rate);
}

#define REAL(name, type, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = dlsym(RTLD_NEXT, name)

ssize_t write(int descriptor, const void *data, size_t size) {
    REAL("write", ssize_t, int, const void *, size_t);
    char path[4096];
    ssize_t done = real(descriptor, data, size);
    if (done > 0 && path_of(descriptor, path, sizeof path) && lies_in(path, "SLOW_DISK_FOLDER")) transfer(done);
    return done;
}

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    REAL("writev", ssize_t, int, const struct iovec *, int);
    char path[4096];
    ssize_t done = real(descriptor, parts, count);
    if (done > 0 && path_of(descriptor, path, sizeof path) && lies_in(path, "SLOW_DISK_FOLDER")) transfer(done);
    return done;
}

ssize_t read(int descriptor, void *data, size_t size) {
    REAL("read", ssize_t, int, void *, size_t);
    char path[4096];
    ssize_t done = real(descriptor, data, size);
    if (done > 0 && path_of(descriptor, path, sizeof path) && lies_in(path, "SLOW_DISK_READS")) transfer(done);
    return done;
}

static int synced(int descriptor, int result) {
    char path[4096];
    if (path_of(descriptor, path, sizeof path) && lies_in(path, "SLOW_DISK_FOLDER")) wait_for(setting("SLOW_DISK_SYNC"));
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
    wait_for(setting("SLOW_DISK_RENAME") / 2);
    int result = real(from, to);
    wait_for(setting("SLOW_DISK_RENAME") / 2);
    return result;
}
