/* Opens every folder that is named, and exports from it, and restores every file in the first one; prints how each went. For runs
 * under sanitizers.
 */
#include "burnish.h"

#include <stdio.h>
#include <string.h>

int main(int count, char **paths) {
    burnish_session *first = NULL;
    for (int i = 1; i < count; i++) {
        burnish_session *session = NULL;
        size_t length = strlen(paths[i]);
        int is_file = length > 12 && strcmp(paths[i] + length - 12, ".safetensors") == 0;
        burnish_status status = is_file ? burnish_restore(first, paths[i]) : burnish_open(paths[i], NULL, &session);
        if (!is_file && status == BURNISH_OK) status = burnish_export(session, "exported.onnx", 0);
        printf("%d %s\n", status, status == BURNISH_OK ? "" : burnish_message());
        if (!is_file && first == NULL)
            first = session;
        else
            burnish_close(session);
    }
    burnish_close(first);
    return 0;
}
