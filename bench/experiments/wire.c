/* A wire between two network devices, with a delay and a rate in each direction: wire NAME NAME DELAY_MS MBIT.

   It makes both (TUN), says so, and passes packets on until it is killed; hosts.py moves each into a namespace. netem, which
   does this within the kernel, is not in every kernel. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { PLACES = 1 << 16, MOST = 65536 };

struct packet {
    char *bytes;
    int count;
    double due;
};

struct direction {
    int from, to;
    double delay_s, bits_per_s;
};

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static int make_device(const char *name) {
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    int file = open("/dev/net/tun", O_RDWR);
    if (file < 0 || ioctl(file, TUNSETIFF, &request)) {
        perror(name);
        exit(1);
    }
    return file;
}

static void *pass_on(void *argument) {
    struct direction *way = argument;
    struct packet *queue = calloc(PLACES, sizeof *queue);
    static _Thread_local char buffer[MOST];
    unsigned first = 0, end = 0;
    double free_at = 0;  /* when the last bit of the packet before has left */
    prctl(PR_SET_TIMERSLACK, 1);
    for (;;) {
        struct pollfd readable = {way->from, POLLIN, 0};
        double wait_s = first == end ? 1.0 : queue[first % PLACES].due - now();
        struct timespec limit = {0, wait_s <= 0 ? 0 : wait_s >= 1 ? 999999999 : (long)(1e9 * wait_s)};
        if (ppoll(&readable, 1, &limit, NULL) > 0 && end - first < PLACES) {
            int count = read(way->from, buffer, MOST);
            if (count <= 0) return NULL;
            double time = now();
            free_at = (free_at > time ? free_at : time) + 8.0 * count / way->bits_per_s;
            struct packet *packet = &queue[end++ % PLACES];
            *packet = (struct packet){memcpy(malloc(count), buffer, count), count, free_at + way->delay_s};
        }
        while (first != end && queue[first % PLACES].due <= now()) {
            struct packet *packet = &queue[first++ % PLACES];
            if (write(way->to, packet->bytes, packet->count) < 0) { /* a device that is down loses it, as a wire would */ }
            free(packet->bytes);
        }
    }
}

int main(int count, char **words) {
    if (count != 5) return 2;
    int a = make_device(words[1]), b = make_device(words[2]);
    double delay_s = 1e-3 * atof(words[3]), bits_per_s = 1e6 * atof(words[4]);
    struct direction ways[2] = {{a, b, delay_s, bits_per_s}, {b, a, delay_s, bits_per_s}};
    puts("up");
    fflush(stdout);
    pthread_t thread;
    pthread_create(&thread, NULL, pass_on, &ways[0]);
    pass_on(&ways[1]);
}
